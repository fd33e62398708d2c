//! Fuzzing without libFuzzer, for any toolchain: `mutate TARGET SECONDS SEED FILES…` mutates files for so long and says
//! how many inputs it tried. An input that panics is kept as `TARGET-NUMBER.input`; the one that is tried is in
//! `TARGET-SEED.current`, for whatever ends the process. Bound memory by `ulimit -v`. An input that takes longer than
//! half a minute ends the process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pieces that make inputs reach further than bytes do.
const PIECES: &[&str] = &[
    "9223372036854775808", "18446744073709551615", "4294967296", "1099511627776", "1048576", "65536", "4096", "-1",
    "0", "1", "0.5", "1e308", "1e-308", "null", "true", "[]", "{}", "\"\"", "{{", "}}", "{% ", " %}", "{% endfor %}",
    "{% endif %}", "{% for m in messages %}", "{% for i in range(99999) %}", "{% set x = x ~ x %}", "{% set ns = namespace(x='ab') %}",
    "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = [ns.x, ns.x] %}", "{% macro m(x) %}", "{% endmacro %}", "{{ m(ns.x) }}",
    "|indent(9999999)", "|replace('a', 'aaaaaaaa')", "|join('xxxxxxxxxxxxxxxx')", "|tojson(indent=60)", "|batch(99999999, 'x')",
    "|list", "|string", "|map('upper')", "|sort", "|reverse", "|length", "|format(1, 2)", ".format(1)", ".split('')",
    ".replace('', 'xxxxxxxx')", "[0:]", "[::-1]", " * 99999999", " + ", " ~ ", " in ", " == ", " is ", " if x else y ",
    "('ab' * 99999)", "'%99999d'", "'{:>99999}'", "loop.index", "raise_exception('x')", "strftime_now('%Y')", "messages", "tools",
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// A number as counts, sizes and offsets are wrong: near a power of two, or anything.
    fn extreme(&mut self) -> u64 {
        match self.below(4) {
            0 => self.next() % 40,
            1 => (1u64 << self.below(64)).wrapping_add(self.next() % 3).wrapping_sub(1),
            2 => u64::MAX - self.next() % 40,
            _ => self.next(),
        }
    }
}

/// Where a run of digits around `at` begins and ends.
fn number(bytes: &[u8], at: usize) -> std::ops::Range<usize> {
    let digits = |b: &&u8| b.is_ascii_digit() || matches!(b, b'.' | b'-');
    let start = at - bytes[..at].iter().rev().take_while(digits).count();
    start..at + bytes[at..].iter().take_while(digits).count()
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(9) {
        _ if bytes.is_empty() => bytes.extend_from_slice(other),
        0 => bytes[at] = random.next() as u8,
        1 => {
            let width = 1 << random.below(4);
            let word = random.extreme().to_le_bytes();
            bytes[at..].iter_mut().zip(&word[..width]).for_each(|(old, new)| *old = *new);
        }
        2 => bytes.truncate(at),
        3 | 4 => {
            let piece = PIECES[random.below(PIECES.len())];
            bytes.splice(at..at, piece.bytes());
        }
        5 | 6 => {
            // The next number, if there is one.
            let digit = bytes[at..].iter().position(u8::is_ascii_digit).map_or(at, |skip| at + skip);
            let new = match random.below(3) {
                0 => PIECES[random.below(18)].to_owned(),
                _ => random.extreme().to_string(),
            };
            bytes.splice(number(bytes, digit), new.into_bytes());
        }
        7 => {
            let (from, len) = (random.below(other.len()), random.below(200));
            let piece = &other[from..other.len().min(from + len)];
            bytes.splice(at..at, piece.iter().copied());
        }
        _ => {
            let end = bytes.len().min(at + random.below(60));
            bytes.drain(at..end);
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [target, seconds, seed, files @ ..] = &args[..] else {
        panic!("mutate TARGET SECONDS SEED FILES…");
    };
    let run: fn(&[u8]) = match target.as_str() {
        "trace" => moeflux_fuzz::trace,
        "session" => moeflux_fuzz::session,
        "template" => moeflux_fuzz::template,
        "config" => moeflux_fuzz::config,
        other => panic!("{other}: expected trace, session, template or config"),
    };
    let mut corpus: Vec<Vec<u8>> =
        files.iter().map(|path| std::fs::read(path).expect("a file to begin with")).collect();
    if target == "session" {
        corpus.push(moeflux_fuzz::saved_session());
    }
    let seconds = Duration::from_secs(seconds.parse().expect("seconds"));
    let mut random = Random(seed.parse::<u64>().expect("a seed").max(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let current = format!("{target}-{seed}.current");
    static TRIED: AtomicU64 = AtomicU64::new(0);
    std::thread::spawn(|| {
        loop {
            let before = TRIED.load(Ordering::Relaxed);
            std::thread::sleep(Duration::from_secs(30));
            if TRIED.load(Ordering::Relaxed) == before {
                eprintln!("an input takes longer than 30 s");
                std::process::exit(3);
            }
        }
    });
    let (start, mut panics, mut slowest) = (Instant::now(), 0, Duration::ZERO);
    while start.elapsed() < seconds {
        let mut input = corpus[random.below(corpus.len())].clone();
        let other = random.below(corpus.len());
        for _ in 0..1 + random.below(4) {
            mutate(&mut input, &corpus[other], &mut random);
        }
        std::fs::write(&current, &input).expect("the current input");
        let begin = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| run(&input))).is_err() {
            panics += 1;
            std::fs::write(format!("{target}-{panics}.input"), &input).expect("an input that panics");
        }
        if begin.elapsed() > slowest {
            slowest = begin.elapsed();
            std::fs::write(format!("{target}-{seed}.slowest"), &input).expect("the slowest input");
        }
        TRIED.fetch_add(1, Ordering::Relaxed);
    }
    let _ = std::fs::remove_file(Path::new(&current));
    println!("{target}: {} inputs, {panics} panics, slowest {slowest:?}", TRIED.load(Ordering::Relaxed));
}
