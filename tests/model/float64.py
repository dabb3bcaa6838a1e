"""Runs `transformers` in float64 throughout.

Its models widen to float32 in norms, rotary tables and softmax, whatever the weights are in, so a float64 model of
theirs has float32's rounding. Here each request for float32 is answered with float64, which leaves the code of theirs
as it is and takes the rounding away.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)  # of what integers are divided to
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        torch.set_default_dtype(torch.float32)
        super().__exit__(*details)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        kwargs = {key: wide(value) for key, value in (kwargs or {}).items()}
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*(wide(value) for value in args), **kwargs)
