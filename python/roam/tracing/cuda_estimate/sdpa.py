"""Scaled dot product attention of fake CUDA tensors on a machine without a device, which PyTorch
would ask for its compute capability.

The choice is the first kernel, in the order in which PyTorch tries them and under the switches of
`torch.backends.cuda`, that devices of compute capability 8.0 or later can run. cuDNN's attention,
which newer devices may prefer, is left out; it keeps as many bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from roam.torch_compat.private import attention_order, run_composite

aten = torch.ops.aten
_LARGEST_HEAD = 256
"""The widest head that flash attention takes."""
_PADDED_TO = 8
"""Rows of heads and masks that a fused kernel is given are padded to a multiple of this number of
elements.
"""


@dataclass(frozen=True, slots=True)
class _Call:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    has_groups: bool

    def backend(self) -> SDPBackend:
        for backend in map(SDPBackend, attention_order()):
            if (
                backend == SDPBackend.FLASH_ATTENTION
                and torch.backends.cuda.flash_sdp_enabled()
                and self._can_flash()
            ):
                return backend
            if (
                backend == SDPBackend.EFFICIENT_ATTENTION
                and torch.backends.cuda.mem_efficient_sdp_enabled()
                and self._can_be_efficient()
            ):
                return backend
            if backend == SDPBackend.MATH:
                return backend
        return SDPBackend.MATH

    def _can_flash(self) -> bool:
        heads = {tensor.shape[-1] for tensor in self._tensors()}
        return (
            self._is_dense(self._tensors())
            and self.mask is None
            and self._is_half()
            and len(heads) == 1
            and heads.pop() <= _LARGEST_HEAD
            and not (self.is_causal and self.query.shape[-2] != self.key.shape[-2])
        )

    def _can_be_efficient(self) -> bool:
        masks = () if self.mask is None else (self.mask,)
        aligned = _PADDED_TO if self._is_half() else 4
        return (
            self._is_dense((*self._tensors(), *masks))
            and self.query.shape[1] == self.key.shape[1]  # it takes no groups
            and (self._is_half() or self.query.dtype is torch.float32)
            and self.query.shape[-1] == self.key.shape[-1]
            and all(tensor.shape[-1] % aligned == 0 for tensor in self._tensors())
            and all(tensor.storage_offset() % aligned == 0 for tensor in self._tensors())
        )

    def _is_dense(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether shapes and strides are such as the fused kernels take."""
        query, key, value = self._tensors()
        if any(tensor.dim() != 4 or 0 in tensor.shape for tensor in self._tensors()):
            return False
        heads = query.shape[1], key.shape[1], value.shape[1]
        fit = (
            heads[0] % heads[1] == 0 and heads[1] == heads[2]
            if self.has_groups
            else len(set(heads)) == 1
        )
        return (
            fit
            and len({t.shape[0] for t in self._tensors()}) == 1
            and all(t.stride(-1) == 1 for t in tensors)
        )

    def _is_half(self) -> bool:
        return self.query.dtype in (torch.float16, torch.bfloat16)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    def flash(self) -> torch.Tensor:
        width = self.query.shape[-1]
        padded = [_padded(tensor) for tensor in self._tensors()]
        scale = 1 / math.sqrt(width) if self.scale is None else self.scale
        result = aten._scaled_dot_product_flash_attention(
            *padded, self.dropout, self.is_causal, False, scale=scale
        )[0]
        return result if result.shape[-1] == width else result[..., :width]  # type: ignore[no-any-return]

    def efficient(self) -> torch.Tensor:
        keeps_sums = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in self._tensors()
        )
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            *self._tensors(),
            self._bias(),
            keeps_sums,
            self.dropout,
            self.is_causal,
            scale=self.scale,
        )[0]

    def _bias(self) -> torch.Tensor | None:
        """The mask as it is added to the scores, in rows that the kernel can read."""
        if self.mask is None:
            return None
        bias, query = self.mask, self.query
        if bias.dtype is torch.bool:
            zero, nothing = (
                aten.scalar_tensor(value, dtype=query.dtype, device=query.device)
                for value in (0.0, -math.inf)
            )
            bias = torch.where(bias, zero, nothing)
        if bias.stride(-1) != 1 or any(stride % _PADDED_TO for stride in bias.stride()[:-1]):
            width = bias.shape[-1]
            bias = torch.nn.functional.pad(bias, (0, _PADDED_TO - width % _PADDED_TO))[..., :width]
        return bias.expand(*query.shape[:-1], self.key.shape[-2])


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % _PADDED_TO
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`aten::scaled_dot_product_attention` as on a device of compute capability 8.0."""
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    backend = call.backend()
    if backend == SDPBackend.FLASH_ATTENTION:
        return call.flash()
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        return call.efficient()
    return run_composite(
        aten.scaled_dot_product_attention.default, *(query, key, value, attn_mask, dropout_p, is_causal),
        is_implicit=True, scale=scale, enable_gqa=enable_gqa,
    )  # fmt: skip


def register() -> torch.library.Library:
    """Puts `attention` in the place of PyTorch's operator for tensors on CUDA, for as long as what
    is returned lives.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    return library
