"""Tensors that lie in files on a local disk: memory holds of them what there is room for, the kernel moves the rest."""

import os
import tempfile

import torch
from torch import Tensor

from pipeline.errors import ConfigError


def on_disk(like: Tensor, folder: str) -> Tensor:
    """Zeros of a host tensor's shape and type. The file has no name any more: however the process ends, its room is
    free again; all of it is taken now, so that a full disk is an error here and no death of the process later."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, like.nbytes))
            return torch.from_file(
                file.name, shared=True, size=like.numel(), dtype=like.dtype
            ).view(like.shape)
    except OSError as error:
        raise ConfigError(
            f"parallel.offload.path={folder}: {error.strerror} ({like.nbytes:,} bytes); give a directory with room on "
            "a disk of each node"
        ) from None
