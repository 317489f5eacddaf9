//! `strftime_now` of chat templates ("Today Date: 26 Jul 2024").

use std::time::{SystemTime, UNIX_EPOCH};

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
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Seconds since 1970-01-01 00:00 UTC.
pub(crate) fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs().min(i64::MAX as u64) as i64)
}

/// Year, month 1-12 and day 1-31 of a day counted from 1970-01-01, in the
/// Gregorian calendar: years start in March so that the leap day is last, and
/// 400 years are 146097 days.
fn civil(day: i64) -> (i64, usize, i64) {
    let day = day + 719_468; // from 0000-03-01
    let era = day.div_euclid(146_097);
    let of_era = day.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153; // 0 = March
    let month = (shifted + 2) % 12 + 1;
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month as usize, of_year - (153 * shifted + 2) / 5 + 1)
}

/// Formats a time in UTC; directives that it does not know stay as written.
pub(crate) fn strftime(format: &str, seconds: i64) -> String {
    let days = seconds.div_euclid(86_400);
    let of_day = seconds.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize]; // 1970-01-01 was a Thursday
    let month_name = MONTHS[month - 1];

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => out += &year.to_string(),
            Some('y') => out += &format!("{:02}", year.rem_euclid(100)),
            Some('m') => out += &format!("{month:02}"),
            Some('d') => out += &format!("{day:02}"),
            Some('e') => out += &format!("{day:2}"),
            Some('B') => out += month_name,
            Some('b' | 'h') => out += &month_name[..3],
            Some('A') => out += weekday,
            Some('a') => out += &weekday[..3],
            Some('H') => out += &format!("{hour:02}"),
            Some('I') => out += &format!("{:02}", (hour + 11) % 12 + 1),
            Some('p') => out += if hour < 12 { "AM" } else { "PM" },
            Some('M') => out += &format!("{minute:02}"),
            Some('S') => out += &format!("{second:02}"),
            Some('j') => out += &format!("{:03}", days - day_number(year) + 1),
            Some('F') => out += &format!("{year}-{month:02}-{day:02}"),
            Some('T') => out += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => out += "UTC",
            Some('z') => out += "+0000",
            Some('%') => out.push('%'),
            Some(other) => out.extend(['%', other]),
            None => out.push('%'),
        }
    }
    out
}

/// Days from 1970-01-01 to January 1 of `year`.
fn day_number(year: i64) -> i64 {
    let before = year - 1;
    365 * (year - 1970) + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400)
        - (1969 / 4 - 1969 / 100 + 1969 / 400)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        // date -u -d @N
        for (seconds, text) in [
            (0, "1970-01-01 Thu 001"),
            (951_782_400, "2000-02-29 Tue 060"),
            (1_721_952_000, "2024-07-26 Fri 208"),
            (1_735_603_199, "2024-12-30 Mon 365"),
            (1_735_689_599, "2024-12-31 Tue 366"),
            (4_107_542_400, "2100-03-01 Mon 060"),
            (-86_400, "1969-12-31 Wed 365"),
        ] {
            assert_eq!(strftime("%Y-%m-%d %a %j", seconds), text);
        }
        assert_eq!(strftime("%d %b %Y, 100%% %q%", 1_721_952_000), "26 Jul 2024, 100% %q%");
        assert_eq!(strftime("%I:%M %p", 13 * 3600 + 5 * 60), "01:05 PM");
    }
}
