//! Version numbers compared as numbers: 2.10 is newer than 2.9.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// The leading dotted numbers of a version; a local suffix (`+cu130`) or a pre-release tail is left out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(Vec<u64>);

impl Version {
    /// Reads `text`, or `None` if it does not start with a number. Trailing zeros do not count: 2.9.0 is 2.9.
    pub fn parse(text: &str) -> Option<Self> {
        let public = text.trim().split('+').next().unwrap_or_default();
        let mut numbers = Vec::new();
        for part in public.split('.') {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            let Ok(number) = digits.parse() else { break };
            numbers.push(number);
            if digits.len() < part.len() {
                break;
            }
        }
        if numbers.is_empty() {
            return None;
        }
        while numbers.len() > 1 && numbers.last() == Some(&0) {
            numbers.pop();
        }
        Some(Self(numbers))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.0.iter().map(u64::to_string).collect();
        // "13" alone does not read as a version; "13.0" does.
        formatter.write_str(&parts.join("."))?;
        if parts.len() == 1 { formatter.write_str(".0") } else { Ok(()) }
    }
}

impl<'de> Deserialize<'de> for Version {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| serde::de::Error::custom(format!("{text:?} is not a version")))
    }
}

#[cfg(test)]
mod tests {
    use super::Version;

    #[test]
    fn versions_compare_as_numbers() {
        let parse = |text| Version::parse(text).unwrap();
        for (newer, older) in [
            ("12.10", "12.9"),
            ("13.0", "12.9"),
            ("2.10.0a0+git12", "2.9.1"),
            ("4.6.0", "4.5.9"),
            ("3", "2.99"),
        ] {
            assert!(parse(newer) > parse(older), "{newer} > {older}");
        }
        assert_eq!(parse("2.9.0+cu130"), parse("2.9"));
        assert_eq!(parse("0.0"), parse("0"));
        assert_eq!(parse("2.9rc1.7"), parse("2.9"));
        assert_eq!(parse("13").to_string(), "13.0");
    }

    #[test]
    fn text_without_a_leading_number_is_no_version() {
        for text in ["", "v2", "unknown", "+cu130", "."] {
            assert_eq!(Version::parse(text), None, "{text:?}");
        }
    }
}
