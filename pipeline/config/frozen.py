"""What every setting is made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")
]  # one line of text that ends where it seems to end
Dtype = Literal["fp32", "bf16"]
# of each block's forward in the backward pass: none, all ("full" too), the feed-forward
Recompute = Annotated[
    bool | Literal["selective"], BeforeValidator(lambda given: given == "full" or given)
]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
