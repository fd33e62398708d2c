//! How the text of a GGUF vocabulary is cut into words before byte-pair merging, by `tokenizer.ggml.pre` name.
//!
//! A GGUF file stores only the *name* of its splitting rule. The rules below give the words that llama.cpp gives for
//! the name, also where llama.cpp is coarser than the model's own `tokenizer.json` (it folds all letter categories of
//! `gpt-4o`, `tekken` and `kimi-k2` into one outside ASCII), because the reference for a GGUF file is llama.cpp.
//!
//! Only characters that Unicode assigned after llama.cpp's tables were made may be cut differently.
//!
//! Each pattern of a rule is applied in turn to the pieces that the earlier ones left; matches and the text between
//! matches both become pieces.

/// English contractions, either case, without Unicode case folding.
macro_rules! contractions {
    () => {
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}

/// Line ends, then runs of other white space; the last space stays with the next word.
macro_rules! spaces {
    () => {
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}

/// A rule of GPT-2's shape whose numbers match `$number`.
macro_rules! words_and_numbers {
    ($number:literal) => {
        concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $number,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|",
            spaces!()
        )
    };
}

/// Words that may change once from upper to lower case; `$contraction` may close a word.
macro_rules! cased_words {
    ($contraction:expr, $number:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
            $contraction,
            r"|[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
            $contraction,
            "|",
            $number,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|",
            spaces!()
        )
    };
}

/// Words of letters and marks, ASCII punctuation bound to the ASCII word after it.
macro_rules! punctuated_words {
    () => {
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
        )
    };
}

/// The ideograph blocks that `kimi-k2` keeps apart from other letters.
macro_rules! ideographs {
    () => {
        concat!(
            r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}",
            r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
        )
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = words_and_numbers!(r"\p{N}{1,3}");
const QWEN2: &str = words_and_numbers!(r"\p{N}");
const DIGITS_FROM_LEFT: &str = r"\p{N}{1,3}";
const CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
/// Everything from Samaritan to the ideographs, and Hangul.
const CJK_AND_HANGUL: &str = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}&&\S]+";
const POPULAR_PUNCTUATION: &str = " ?[^(\\s|.,!?…。，、।۔،)]+";

/// Latin, Greek, Cyrillic and the other cased scripts, as `deepseek-llm` lists them.
const CASED_SCRIPTS: &str = concat!(
    r"\s?[A-Za-z",
    r"\x{00B5}\x{00C0}-\x{00D6}\x{00D8}-\x{00F6}\x{00F8}-\x{01BA}\x{01BC}-\x{01BF}",
    r"\x{01C4}-\x{0293}\x{0295}-\x{02AF}\x{0370}-\x{0373}\x{0376}\x{0377}\x{037B}-\x{037D}",
    r"\x{037F}\x{0386}\x{0388}-\x{038A}\x{038C}\x{038E}-\x{03A1}\x{03A3}-\x{03F5}",
    r"\x{03F7}-\x{0481}\x{048A}-\x{052F}\x{0531}-\x{0556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}",
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}",
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}",
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}",
    r"\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}",
    r"\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}",
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}",
    r"\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}",
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}",
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}",
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}",
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    "]+"
);

/// Cutting numbers in threes from the right, before any pattern. As a pattern it takes time quadratic in the digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Digits {
    /// Only patterns cut numbers.
    Pattern,
    /// A number's first digits stay with the text before them.
    WithTextBefore,
    /// Numbers stand alone, and only ASCII digits are counted.
    Alone,
}

/// One splitting rule.
pub(crate) struct PreTokenizer {
    /// The values of `tokenizer.ggml.pre` that mean this rule.
    names: &'static [&'static str],
    /// How numbers are cut first.
    pub(super) digits: Digits,
    /// Patterns, applied in turn.
    pub(crate) patterns: &'static [&'static str],
    /// A word that is a token as it stands is not merged from its bytes.
    pub(super) ignore_merges: bool,
    /// Whether text begins with BOS when the file does not say.
    pub(super) add_bos: bool,
}

const fn rule(names: &'static [&'static str], patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, digits: Digits::Pattern, patterns, ignore_merges: false, add_bos: false }
}

const RULES: &[PreTokenizer] = &[
    rule(&["", "default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    rule(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        &[GPT2],
    ),
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..rule(
            &[
                "llama-bpe",
                "llama3",
                "llama-v3",
                "falcon3",
                "falcon-h1",
                "pixtral",
                "midm-2.0",
                "lfm2",
                "jina-v5-nano",
            ],
            &[LLAMA3],
        )
    },
    rule(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    PreTokenizer { ignore_merges: true, ..rule(&["glm4", "glm5"], &[LLAMA3]) },
    rule(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN2],
    ),
    rule(
        &["qwen35"],
        &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|",
            spaces!()
        )],
    ),
    rule(&["ufakzeka"], &[concat!(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|", spaces!())]),
    rule(&["laguna"], &["[^\\n]+|[\\n]+", QWEN2]),
    PreTokenizer {
        ignore_merges: true,
        ..rule(&["minicpm5"], &[DIGITS_FROM_LEFT, words_and_numbers!(r"\p{N}+")])
    },
    rule(
        &["seed-coder"],
        &[concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|", spaces!())],
    ),
    rule(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[concat!(
            "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
    ),
    rule(
        &["exaone-moe"],
        &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?",
            r"|\s*[\r\n]|\s+(?!\S)|\s+"
        )],
    ),
    rule(
        &["jais-2"],
        &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
            r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        )],
    ),
    rule(
        &["deepseek-llm"],
        &[
            "[\\r\\n]",
            CASED_SCRIPTS,
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]+",
            "\\s+$",
            CJK_AND_HANGUL,
            r"\p{N}+",
        ],
    ),
    rule(&["deepseek-coder"], &["[\\r\\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_AND_HANGUL, r"\p{N}"]),
    rule(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[DIGITS_FROM_LEFT, CJK, concat!(punctuated_words!(), r"[\r\n]*|", spaces!())],
    ),
    rule(
        &["spark2_5"],
        &[DIGITS_FROM_LEFT, CJK, concat!(punctuated_words!(), r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}"],
    ),
    PreTokenizer {
        digits: Digits::WithTextBefore,
        ..rule(
            &["afmoe"],
            &[
                concat!(
                    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}",
                    r"\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}",
                    r"\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
                ),
                concat!(punctuated_words!(), r"[\r\n]*|", spaces!()),
            ],
        )
    },
    PreTokenizer {
        ignore_merges: true,
        ..rule(
            &["youtu"],
            &[
                concat!(
                    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+",
                    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}",
                    r"\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+",
                    r"|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
                ),
                concat!(
                    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                    contractions!(),
                    r"?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|",
                    spaces!()
                ),
            ],
        )
    },
    rule(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    rule(
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[r"\p{N}", GPT2],
    ),
    rule(&["poro-chat", "bloom", "gpt3-finnish"], &[POPULAR_PUNCTUATION]),
    rule(&["viking"], &[POPULAR_PUNCTUATION, r"\p{N}"]),
    PreTokenizer { ignore_merges: true, add_bos: true, ..rule(&["tekken"], &[cased_words!("", r"\p{N}")]) },
    rule(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[cased_words!(concat!(contractions!(), "?"), r"\p{N}{1,3}")],
    ),
    PreTokenizer {
        ignore_merges: true,
        ..rule(
            &["granite-embed-multi-97m"],
            &[concat!(
                r"[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]*[[\p{L}\p{M}]&&[^A-Z]]+",
                contractions!(),
                r"?|[^\r\n\p{L}\p{N}]?[[\p{L}\p{M}]&&[^a-z]]+[[\p{L}\p{M}]&&[^A-Z]]*",
                contractions!(),
                r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|",
                spaces!()
            )],
        )
    },
    PreTokenizer {
        digits: Digits::WithTextBefore,
        ..rule(
            &["tiny_aya", "cohere2moe"],
            &[concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                contractions!(),
                r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|",
                spaces!()
            )],
        )
    },
    rule(
        &["kimi-k2"],
        &[concat!(
            "[",
            ideographs!(),
            r"]+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^",
            ideographs!(),
            "]]+",
            contractions!(),
            r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
            spaces!()
        )],
    ),
    PreTokenizer { digits: Digits::Alone, ..rule(&["superbpe"], &[]) },
    PreTokenizer {
        add_bos: true,
        ..rule(
            &["chameleon"],
            &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                "([\\t\\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
        )
    },
];

impl Digits {
    /// The pieces of `text` in order.
    pub(super) fn split(self, text: &str) -> Vec<&str> {
        let mut cuts: Vec<usize> = Vec::new();
        let mut at = 0;
        while self != Self::Pattern && at < text.len() {
            let rest = &text[at..];
            let start = at + rest.find(char::is_numeric).unwrap_or(rest.len());
            let number = &text[start..];
            let end = start + number.find(|c: char| !c.is_numeric()).unwrap_or(number.len());
            match self {
                Self::Pattern => {}
                Self::WithTextBefore => {
                    cuts.extend(groups_of_three(&text[start..end]).map(|cut| start + cut))
                }
                Self::Alone => {
                    cuts.push(start);
                    let mut from = start;
                    for run in text[start..end].split_inclusive(|c: char| !c.is_ascii_digit()) {
                        let digits = run.trim_end_matches(|c: char| !c.is_ascii_digit());
                        if digits.len().is_multiple_of(3) && !digits.is_empty() {
                            cuts.push(from);
                        }
                        cuts.extend(
                            groups_of_three(digits).filter(|cut| *cut < digits.len()).map(|cut| from + cut),
                        );
                        from += run.len();
                    }
                    cuts.push(end);
                }
            }
            at = end;
        }
        cuts.push(text.len());
        let mut pieces = Vec::with_capacity(cuts.len());
        let mut from = 0;
        for cut in cuts {
            if cut > from {
                pieces.push(&text[from..cut]);
                from = cut;
            }
        }
        pieces
    }
}

/// The ends of groups of three characters of `number`, of which the first group may be shorter.
fn groups_of_three(number: &str) -> impl Iterator<Item = usize> {
    let count = number.chars().count();
    let ends = number.char_indices().map(|(at, c)| at + c.len_utf8());
    ends.enumerate().filter_map(move |(index, end)| (count - index - 1).is_multiple_of(3).then_some(end))
}

/// The rule that `name` means; an absent name is the empty one.
pub(crate) fn by_name(name: &str) -> Option<&'static PreTokenizer> {
    RULES.iter().find(|rule| rule.names.contains(&name))
}

/// Every name that [`by_name`] knows, comma-separated.
pub(super) fn known_names() -> String {
    let mut names: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_cut_from_the_right() {
        let check = |digits: Digits, text: &str, expected: &[&str]| {
            assert_eq!(digits.split(text), expected, "{text:?}")
        };
        for digits in [Digits::Pattern, Digits::WithTextBefore, Digits::Alone] {
            check(digits, "", &[]);
            check(digits, "a b", &["a b"]);
            check(digits, "12", &["12"]);
        }
        check(Digits::Pattern, "a1234", &["a1234"]);
        check(Digits::WithTextBefore, "a1234 56", &["a1", "234", " 56"]);
        check(Digits::WithTextBefore, "  123456x", &["  123", "456", "x"]);
        check(Digits::WithTextBefore, "12½3", &["1", "2½3"]);
        check(Digits::Alone, "a1234 56", &["a", "1", "234", " ", "56"]);
        check(Digits::Alone, "123456x", &["123", "456", "x"]);
        check(Digits::Alone, "½123½1234½", &["½", "123½1", "234½"]);
    }
}
