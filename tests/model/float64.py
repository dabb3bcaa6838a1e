"""A mode that runs `transformers` in float64 throughout.

Its models convert to float32 in norms, rotary tables and softmax for any type of weights, so a float64 model would have float32's
rounding. This mode replaces each request for float32 with float64: the code of transformers stays as it is, without the rounding.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)  # the type that integers are divided in
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
