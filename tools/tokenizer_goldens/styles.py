"""The shapes that published byte-level `tokenizer.json` files have, by the model that has them."""

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = "[一-龥぀-ゟ゠-ヿ]+"


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _bos(token: str, token_id: int) -> processors.PostProcessor:
    template = processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)])
    return processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def apply(style: str, tokenizer: object, bos: str) -> None:
    """Gives `tokenizer` the parts of `style` around its model."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.normalizer = None
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    match style:
        case "gpt2":
            tokenizer.pre_tokenizer = gpt2
        case "gpt2-prefix-space":
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
        case "olmo":
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = gpt2
        case "starcoder":
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case "qwen2":
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = _split(QWEN2)
        case "qwen35":
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = _split(QWEN35)
        case "llama3":
            tokenizer.pre_tokenizer = _split(LLAMA3)
            tokenizer.model.ignore_merges = True
            tokenizer.post_processor = _bos(bos, tokenizer.token_to_id(bos))
        case "gpt-oss":
            tokenizer.pre_tokenizer = _split(O200K)
            tokenizer.post_processor = None
        case "deepseek-v3":
            tokenizer.normalizer = normalizers.Sequence([])
            tokenizer.pre_tokenizer = _split(r"\p{N}{1,3}", CJK, DEEPSEEK_V3)
            tokenizer.post_processor = _bos(bos, tokenizer.token_to_id(bos))
        case _:
            raise ValueError(style)


STYLES = ["gpt2", "gpt2-prefix-space", "olmo", "starcoder", "qwen2", "qwen35", "llama3", "gpt-oss", "deepseek-v3"]
