"""The block table against the gguf package's."""

import gguf

from ds4.ggml_types import BLOCK_SIZES, GgmlType


def test_every_type_has_the_block_that_the_gguf_package_gives_it() -> None:
    for ggml_type in GgmlType:
        theirs = gguf.GGMLQuantizationType[ggml_type.name]
        assert int(theirs) == int(ggml_type)
        assert gguf.GGML_QUANT_SIZES[theirs] == BLOCK_SIZES[ggml_type]
