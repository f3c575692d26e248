"""Fragments on disk, through torch.distributed.checkpoint: every rank writes its own runs of numbers, and reads just
the overlaps of what it needs with what was written, in whatever layout.

Each global tensor is stored flat, in one-dimensional chunks. torch would keep the index as a pickle; ours is JSON
inside the sealed manifest, so that nothing from outside is ever unpickled but tensors, with weights_only.
"""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from pipeline.errors import RunError
from pipeline.parallel.fragments import Fragment

Index = dict[
    str, dict[str, Any]
]  # key → dtype, numel and chunks of [offset, numel, file, first byte, bytes]

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled"
)  # where one process reads or writes alone


def write(directory: Path, fragments: Sequence[Fragment], group: dist.ProcessGroup | None) -> Index:
    """Every rank of the group calls it; returns where each number went, all ranks' together."""
    writer = _Writer(directory, per_thread_copy_ahead=0)  # the copies lie in host memory already
    alone = group is None
    found = save(
        {}, storage_writer=writer, planner=_Save(fragments), process_group=group, no_dist=alone
    )
    index: Index = {
        key: {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "numel": entry.size.numel(),
            "chunks": [],
        }
        for key, entry in found.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    for at, info in found.storage_data.items():
        chunk = found.state_dict_metadata[at.fqn].chunks[at.index]
        place = [*chunk.offsets, *chunk.sizes, info.relative_path, info.offset, info.length]
        index[at.fqn]["chunks"].append(place)
    return index


def read(directory: Path, index: Index, fragments: Sequence[Fragment]) -> None:
    """Fill this rank's fragments, alone."""
    for fragment in fragments:
        entry = index.get(fragment.key)
        if entry is None or entry["numel"] != fragment.global_numel:
            held = f"{entry['numel']:,} numbers" if entry else "nothing"
            raise RunError(
                f"checkpoint {directory} has {held} for {fragment.key}, this model {fragment.global_numel:,}; "
                "it belongs to another model"
            )
    reader = _Reader(directory, {f.key: index[f.key] for f in fragments})
    load({}, storage_reader=reader, planner=_Load(fragments), no_dist=True)


class _Save(DefaultSavePlanner):
    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = {_at(f): f for f in fragments}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(at, fragment) for at, fragment in self._held.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._held[write_item.index].data


class _Load(DefaultLoadPlanner):
    def __init__(self, fragments: Iterable[Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = {_at(f): f for f in fragments}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for fragment in self._held.values():
            stored = self.metadata.state_dict_metadata[fragment.key]
            assert isinstance(stored, TensorStorageMetadata)
            reads = create_read_items_for_chunk_list(fragment.key, stored, [_chunk(fragment)])
            assert sum(item.lengths.numel() for item in reads) == len(fragment.data), (
                f"{fragment.key} has a gap"
            )
            items += reads
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        (start,), (length,) = read_item.dest_offsets, read_item.lengths
        return self._held[read_item.dest_index].data[start : start + length]


class _Writer(FileSystemWriter):
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {each.index: each.storage_data for part in results for each in part}


class _Reader(FileSystemReader):
    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        entries: dict[str, Any] = {}
        places = {}
        for key, entry in self._index.items():
            chunks = []
            for number, (offset, numel, file, first, length) in enumerate(entry["chunks"]):
                chunks.append(ChunkStorageMetadata(torch.Size([offset]), torch.Size([numel])))
                places[MetadataIndex(key, [offset], number)] = _StorageInfo(file, first, length)
            entries[key] = TensorStorageMetadata(
                TensorProperties(), torch.Size([entry["numel"]]), chunks
            )
        return Metadata(entries, storage_data=places)


def _at(fragment: Fragment) -> MetadataIndex:
    return MetadataIndex(fragment.key, [fragment.offset])


def _chunk(fragment: Fragment) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([fragment.offset]), torch.Size([len(fragment.data)]))


def _item(at: MetadataIndex, fragment: Fragment) -> WriteItem:
    properties = TensorProperties(dtype=fragment.data.dtype)
    data = TensorWriteData(_chunk(fragment), properties, torch.Size([fragment.global_numel]))
    return WriteItem(at, WriteItemType.SHARD, tensor_data=data)
