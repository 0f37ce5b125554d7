"""Dequantises FP8 weights, with one scale for each block of the size that config.json states.

transformers (5.17) divides a matrix into as many equal blocks as it has scales, whatever size of blocks config.json
states. But with the stated size, the last block of a side may be smaller than the others. So transformers refuses
DeepSeek's matrices of 576 rows with 5 scales for blocks of 128, and reads 192 rows with 2 scales as blocks of 96.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

METHOD = "kvbench-fp8"  # the name under which transformers finds this conversion

register_quantization_config(METHOD)(FineGrainedFP8Config)


class _StatedBlocks(Fp8Dequantize):
    def _dequantize_one(self, quantized: Any, scales: Any, output_dtype: torch.dtype | None = None) -> Any:
        """Dequantise a matrix. If it has one scale per stated block, and its last block of a side is smaller than the
        others, pad it to whole blocks first; else do as transformers does."""
        block = self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        sides = quantized.shape[-2:]
        count = [-(-side // length) for side, length in zip(sides, block, strict=True)]
        whole = [number * length for number, length in zip(count, block, strict=True)]
        if whole == list(sides) or list(scales.shape[-2:]) != count:
            return super()._dequantize_one(quantized, scales, output_dtype)
        below, right = whole[0] - sides[0], whole[1] - sides[1]
        padded = torch.nn.functional.pad(quantized.float(), (0, right, 0, below))
        return super()._dequantize_one(padded, scales, output_dtype)[..., : sides[0], : sides[1]].contiguous()


@register_quantizer(METHOD)
class _Quantizer(FineGrainedFP8HfQuantizer):
    def update_weight_conversions(self, weight_conversions: Any) -> Any:
        conversions = super().update_weight_conversions(weight_conversions)
        for conversion in conversions:
            if isinstance(conversion, WeightConverter):
                steps = conversion.operations
                conversion.operations = [_StatedBlocks(self) if type(step) is Fp8Dequantize else step for step in steps]
        return conversions
