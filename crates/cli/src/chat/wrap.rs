//! [`Wrap`]: text that arrives in pieces, broken between words where the terminal's line ends.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Columns of a tab stop.
const TAB: usize = 8;

/// Breaks lines of a terminal of some width. Code, which stands between fences, and lines of tables stay as they are.
#[derive(Debug, Default)]
pub struct Wrap {
    /// Columns that are taken of the present line.
    column: usize,
    /// Space that is written before the next word, unless the line ends there.
    gap: String,
    /// A word that may not be complete.
    word: String,
    /// The present line as far as it matters to what it is.
    line: String,
    fenced: bool,
}

impl Wrap {
    /// What of the text so far can be written, with `text` after it.
    pub fn push(&mut self, text: &str, width: usize) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c == '\n' {
                self.flush(&mut out, width);
                self.end_line();
                out.push('\n');
            } else if c == ' ' || c == '\t' {
                self.flush(&mut out, width);
                self.gap.push(c);
                self.note(c);
            } else {
                self.word.push(c);
                self.note(c);
            }
        }
        // What cannot be moved to the next line need not wait for its end.
        if self.is_kept() || self.word.width() >= width {
            self.flush(&mut out, width);
        }
        out
    }

    /// The rest, when nothing follows; what comes then begins a line.
    pub fn finish(&mut self, width: usize) -> String {
        let mut out = String::new();
        self.flush(&mut out, width);
        *self = Self::default();
        out
    }

    /// Whether the present line's breaks are its own.
    fn is_kept(&self) -> bool {
        self.fenced || self.line.starts_with(['|', '\t']) || self.line.starts_with("    ")
    }

    fn note(&mut self, c: char) {
        if self.line.len() < 16 {
            self.line.push(c);
        }
    }

    fn end_line(&mut self) {
        if self.line.trim_start().starts_with("```") {
            self.fenced = !self.fenced;
        }
        self.gap.clear();
        self.line.clear();
        self.column = 0;
    }

    fn flush(&mut self, out: &mut String, width: usize) {
        if self.word.is_empty() {
            return;
        }
        let gap: usize = self.gap.chars().map(|c| if c == '\t' { TAB } else { c.width().unwrap_or(0) }).sum();
        let wide = self.word.width();
        if !self.is_kept() && self.column > 0 && self.column + gap + wide > width && wide < width {
            out.push('\n');
            self.column = wide;
        } else {
            out.push_str(&self.gap);
            // A line that is just full stays the present one.
            self.column = (self.column + gap + wide).saturating_sub(1) % width.max(1) + 1;
        }
        out.push_str(&self.word);
        self.gap.clear();
        self.word.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::Wrap;

    fn wrapped(text: &str, width: usize, piece: usize) -> String {
        let mut wrap = Wrap::default();
        let chars: Vec<char> = text.chars().collect();
        let pieces = chars.chunks(piece).map(|piece| piece.iter().collect::<String>());
        let mut out: String = pieces.map(|piece| wrap.push(&piece, width)).collect();
        out.push_str(&wrap.finish(width));
        out
    }

    #[test]
    fn lines_break_between_words_however_they_arrive() {
        let cases = [
            ("one two three", "one two\nthree"),
            ("one  two\nthree four five", "one  two\nthree four\nfive"),
            ("Überlange Wörter hier", "Überlange\nWörter\nhier"),
            ("a verylongwordindeed b", "a verylongwordindeed\nb"),
            ("日本語 日本語 x", "日本語\n日本語 x"),
            (
                "```\nlet a = some(code);\n```\nafter that it wraps",
                "```\nlet a = some(code);\n```\nafter that\nit wraps",
            ),
            ("| a | table | stays |\n", "| a | table | stays |\n"),
            ("    indented code stays", "    indented code stays"),
            ("ends with space ", "ends with\nspace"),
        ];
        for (text, expected) in cases {
            for piece in [1, 2, 3, 100] {
                assert_eq!(wrapped(text, 10, piece), expected, "pieces of {piece}");
            }
        }
    }
}
