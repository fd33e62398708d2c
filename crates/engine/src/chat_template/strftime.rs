//! `strftime` in the C locale, for templates that print the date.

use std::fmt::Write as _;

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A UTC date and time.
#[derive(Clone, Copy, Debug)]
struct Time {
    year: i64,
    /// 1 to 12.
    month: u8,
    /// 1 to 31.
    day: u8,
    /// 1 to 366.
    day_of_year: u16,
    /// From Sunday.
    weekday: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Time {
    /// From seconds since 1970-01-01; the calendar is Howard Hinnant's `civil_from_days`.
    fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let of_day = seconds.rem_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let of_era = shifted.rem_euclid(146_097);
        let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let from_march = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let day = from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month > 2 { from_march + 60 + i64::from(is_leap) } else { from_march - 305 };
        // Every remainder below fits its field.
        Self {
            year,
            month: month as u8,
            day: day as u8,
            day_of_year: day_of_year as u16,
            weekday: (days + 4).rem_euclid(7) as u8,
            hour: (of_day / 3_600) as u8,
            minute: (of_day / 60 % 60) as u8,
            second: (of_day % 60) as u8,
        }
    }
}

/// Formats a time given as seconds since 1970-01-01 UTC. Conversions that are not known stay as they are written.
pub(super) fn strftime(seconds: i64, format: &str) -> String {
    let time = Time::from_unix(seconds);
    let mut output = String::new();
    conversions(&time, seconds, format, &mut output);
    output
}

fn conversions(time: &Time, seconds: i64, format: &str, output: &mut String) {
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        output.push_str(&rest[..at]);
        let spec = &rest[at + 1..];
        let (unpadded, spec) = match spec.strip_prefix('-') {
            Some(spec) => (true, spec),
            None => (false, spec),
        };
        let Some(conversion) = spec.chars().next() else {
            output.push_str(&rest[at..]);
            return;
        };
        let hour12 = (time.hour + 11) % 12 + 1;
        let number =
            |value: i64, width: usize| if unpadded { value.to_string() } else { format!("{value:0width$}") };
        let weekday = WEEKDAYS[usize::from(time.weekday)];
        let month = MONTHS[usize::from(time.month) - 1];
        let text = match conversion {
            'Y' => number(time.year, 4),
            'C' => number(time.year.div_euclid(100), 2),
            'y' => number(time.year.rem_euclid(100), 2),
            'm' => number(time.month.into(), 2),
            'd' => number(time.day.into(), 2),
            'e' if unpadded => time.day.to_string(),
            'e' => format!("{:2}", time.day),
            'j' => number(time.day_of_year.into(), 3),
            'H' => number(time.hour.into(), 2),
            'I' => number(hour12.into(), 2),
            'M' => number(time.minute.into(), 2),
            'S' => number(time.second.into(), 2),
            'f' => "000000".to_owned(),
            'p' => if time.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'w' => time.weekday.to_string(),
            'u' => ((time.weekday + 6) % 7 + 1).to_string(),
            'a' => weekday[..3].to_owned(),
            'A' => weekday.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'B' => month.to_owned(),
            's' => seconds.to_string(),
            // A time without a zone has neither.
            'z' | 'Z' => String::new(),
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            'F' | 'T' | 'D' | 'R' | 'r' | 'c' | 'x' | 'X' => {
                let parts = match conversion {
                    'F' => "%Y-%m-%d",
                    'T' | 'X' => "%H:%M:%S",
                    'R' => "%H:%M",
                    'r' => "%I:%M:%S %p",
                    'c' => "%a %b %e %H:%M:%S %Y",
                    _ => "%m/%d/%y",
                };
                conversions(time, seconds, parts, output);
                String::new()
            }
            other => {
                // Writing to a String cannot fail.
                let _ = write!(output, "%{}{other}", if unpadded { "-" } else { "" });
                String::new()
            }
        };
        output.push_str(&text);
        rest = &spec[conversion.len_utf8()..];
    }
    output.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::strftime;

    fn check(seconds: i64, format: &str, expected: &str) {
        assert_eq!(strftime(seconds, format), expected, "{seconds} {format}");
    }

    // Expected values are those of Python's datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None).strftime().
    #[test]
    fn dates_are_pythons() {
        check(0, "%Y-%m-%d %H:%M:%S %A %j", "1970-01-01 00:00:00 Thursday 001");
        check(1_709_210_096, "%d %b %Y, %I:%M %p", "29 Feb 2024, 12:34 PM");
        check(1_735_689_599, "%A, %B %-d, %Y %j %y", "Tuesday, December 31, 2024 366 24");
        check(4_107_542_400, "%F %T %D %a %e", "2100-03-01 00:00:00 03/01/00 Mon  1");
        check(951_782_400, "%c|%x|%X|%u|%w", "Tue Feb 29 00:00:00 2000|02/29/00|00:00:00|2|2");
        check(-1, "%F %T 100%% %", "1969-12-31 23:59:59 100% %");
    }
}
