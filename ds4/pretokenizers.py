"""How `tokenizer.ggml.pre` cuts text into words before byte-pair merging.

Owns: the table from pre-tokenizer name to split expressions. Runs in: front ends (pure data).
Source: the regular expressions are those published in the models' own tokenizer.json files; which
name uses which, and which vocabularies skip merges for whole words, follows llama.cpp's
`llama-vocab.cpp`. Every name here was compared with llama.cpp by tests/vectors/make_tokenizer.py.

A name that is not here must be refused: a wrong split gives plausible but wrong ids.
"""

from typing import Final

import msgspec


class PreTokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """`splits` are applied one after the other, each cutting the pieces of the one before.

    `ignore_merges`: a word that is itself in the vocabulary is taken whole, whatever the merges say.
    `byte_level`: pieces are mapped to GPT-2's printable byte alphabet; else the vocabulary holds
    UTF-8 text with U+2581 for a space and `<0xNN>` pieces for bytes.
    `add_bos`: the default where the file has no `add_bos_token`.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    byte_level: bool = True
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_DIGIT = r"\p{N}"


def _modern(digits: str, *, word: str = r"\p{L}", contraction: str = _CONTRACTION + "|") -> str:
    """The cl100k family: one leading symbol joins a word, newlines join the symbols before them."""
    other = rf"[^\s{word}\p{{N}}]+"
    letters = f"[{word}]+"
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{other}[\r\n]*|\s*[\r\n]+|{_SPACES}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(digits: str, *, contraction: str = "") -> str:
    """The o200k family: words are cut where the case changes."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
    )


_LLAMA3 = _modern(r"\p{N}{1,3}")
_QWEN2 = _modern(_DIGIT)
_CJK_HANGUL = "[一-龥\u0800-一가-\ud7ff]+"
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    _PUNCTUATED + r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
)

# Letters with case, as of the Unicode version that DeepSeek LLM was trained with.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟"
    "𞤀-𞥃"
)

_GROUPS: Final[tuple[tuple[str, PreTokenizer], ...]] = (
    (
        "gpt-2 mpt olmo phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
        PreTokenizer(splits=(_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer(splits=(_DIGIT, _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("glm4 glm5", PreTokenizer(splits=(_LLAMA3,), ignore_merges=True)),
    ("smaug-bpe dbrx chatglm-bpe", PreTokenizer(splits=(_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo f2llmv2 grok-2",
        PreTokenizer(splits=(_QWEN2,)),
    ),
    ("qwen35", PreTokenizer(splits=(_modern(_DIGIT, word=r"\p{L}\p{M}"),))),
    (
        "deepseek-v3 joyai-llm hunyuan-dense hy_v4",
        PreTokenizer(splits=_DEEPSEEK3),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            splits=(
                "[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _CJK_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(splits=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, _DIGIT)),
    ),
    (
        "falcon",
        PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-4o llama4 kanana2 minimax-m2",
        PreTokenizer(splits=(_cased(r"\p{N}{1,3}", contraction=_CONTRACTION + "?"),)),
    ),
    ("tekken", PreTokenizer(splits=(_cased(_DIGIT),), ignore_merges=True, add_bos=True)),
    (
        "gemma4",
        PreTokenizer(splits=(r"[^\n]+|[\n]+",), byte_level=False, add_bos=True),
    ),
    (
        "default",
        PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
)

PRE_TOKENIZERS: Final = {name: entry for names, entry in _GROUPS for name in names.split()}
