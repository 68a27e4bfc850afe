"""A model file's tensors, mapped and checked against the shapes an architecture expects.

Owns: the read-only mapping of the model file. Runs in: the worker, at load. The arrays stay views
of the mapping, so the weights are read from disk when a device repacks them and never copied here.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ds4.ggml_types import GgmlType
from ds4.model_file import ModelFile
from workers.model.program import Tensor
from workers.quant.dequantise import DEQUANTISABLE, dequantise


class Weights:
    """Hands out tensors by name, and knows which of them nobody asked for."""

    def __init__(self, model: ModelFile) -> None:
        self._model = model
        self._taken: set[str] = set()
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(model.path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise model.fault(f"cannot be mapped: {error}") from None

    def has(self, name: str) -> bool:
        """True where the file holds a tensor of that name."""
        return name in self._model.tensors

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, which must exist with exactly `shape` ([outputs, inputs] or [n]) and a readable type."""
        info = self._model.tensors.get(name)
        if info is None:
            raise self._model.fault(f"the tensor {name!r} is missing")
        if info.shape != shape:
            raise self._model.fault(
                f"the tensor {name!r} has the shape {list(info.shape)}; the metadata ask for {list(shape)}"
            )
        if info.ggml_type not in DEQUANTISABLE:
            raise self._model.fault(
                f"the tensor {name!r} has the type {GgmlType(info.ggml_type).name}, which is not supported"
            )
        if info.offset + info.num_bytes > len(self._bytes):
            raise self._model.fault("the file became shorter while it was loaded")
        self._taken.add(name)
        return Tensor(
            name=name,
            ggml_type=info.ggml_type,
            shape=shape,
            data=self._bytes[info.offset : info.offset + info.num_bytes],
        )

    def take_vector(self, name: str, size: int) -> Tensor:
        """A tensor [size] that devices read as plain float32: norms and biases. Other types are widened."""
        tensor = self.take(name, (size,))
        if tensor.ggml_type == GgmlType.F32:
            return tensor
        return Tensor(
            name=name,
            ggml_type=GgmlType.F32,
            shape=(size,),
            data=dequantise(tensor.data, tensor.ggml_type, tensor.shape).view(np.uint8),
        )

    def optional_vector(self, name: str, size: int) -> Tensor | None:
        """Like `take_vector`, or None where the file has no such tensor."""
        return self.take_vector(name, size) if self.has(name) else None

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raise ModelFileError when tensors are left over: a program without them would be a wrong one."""
        left = sorted(set(self._model.tensors) - self._taken - set(ignored))
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise self._model.fault(
                f"tensors that this {self._model.architecture} program does not know: {', '.join(left[:3])}{more}"
            )
