//! GPT-2's printable alphabet for bytes: a character of a byte-level token is one byte of text.

use std::sync::LazyLock;

/// The first 188 bytes in order are printable and stand for themselves; the others follow from U+0100 on.
fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte for each character of the alphabet, which ends at U+0143.
static BYTES: LazyLock<[Option<u8>; 0x144]> = LazyLock::new(|| {
    let mut bytes = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        if is_printable(byte) {
            bytes[usize::from(byte)] = Some(byte);
        } else {
            bytes[next] = Some(byte);
            next += 1;
        }
    }
    bytes
});

/// The byte that `c` stands for, if it is of the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    BYTES.get(c as usize).copied().flatten()
}

/// Every byte with its character.
pub(crate) fn alphabet() -> impl Iterator<Item = (u8, char)> {
    BYTES.iter().enumerate().filter_map(|(code, byte)| Some(((*byte)?, char::from_u32(code as u32)?)))
}

/// `bytes` in the alphabet.
pub(super) fn written(bytes: &[u8]) -> String {
    static CHARACTERS: LazyLock<[char; 256]> = LazyLock::new(|| {
        let mut characters = ['\0'; 256];
        alphabet().for_each(|(byte, c)| characters[usize::from(byte)] = c);
        characters
    });
    bytes.iter().map(|byte| CHARACTERS[usize::from(*byte)]).collect()
}

/// Appends the bytes of `token`: of its characters where all are of the alphabet, else its own text.
pub(super) fn decode_token(token: &str, output: &mut Vec<u8>) {
    let begin = output.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => output.push(byte),
            None => {
                output.truncate(begin);
                output.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = alphabet().map(|(byte, _)| byte).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
        for (byte, expected) in [(b' ', 'Ġ'), (b'\n', 'Ċ'), (b'a', 'a'), (0xAD, 'Ń'), (0xC3, 'Ã')] {
            assert!(alphabet().any(|pair| pair == (byte, expected)), "{byte:#04x}");
        }
    }

    #[test]
    fn tokens_outside_the_alphabet_are_text() {
        let check = |token: &str, expected: &[u8]| {
            let mut bytes = Vec::new();
            decode_token(token, &mut bytes);
            assert_eq!(bytes, expected, "{token}");
        };
        check("Ġhi", b" hi");
        check("ðŁĺĢ", "😀".as_bytes());
        check("<｜end｜>", "<｜end｜>".as_bytes());
    }
}
