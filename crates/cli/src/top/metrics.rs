//! Figures in Prometheus' text format.

use std::collections::HashMap;

/// Values by name and labels, as in `moeflux_tokens_total{kind="prompt"}`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(HashMap<String, f64>);

impl Metrics {
    /// Reads a page of metrics; lines that are none are left out.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let values = lines.filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.trim().to_owned(), value.parse().ok()?))
        });
        Self(values.collect())
    }

    /// The value of `moeflux_NAME`; 0 if there is none.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(&format!("moeflux_{name}")).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Metrics;

    #[test]
    fn pages_are_read() {
        let page = "# HELP moeflux_a A.\n# TYPE moeflux_a counter\nmoeflux_a 3\nmoeflux_b{c=\"d e\"} 0.5\nnonsense\n\nx y\n";
        let metrics = Metrics::parse(page);
        assert_eq!((metrics.get("a"), metrics.get("b{c=\"d e\"}"), metrics.get("x")), (3.0, 0.5, 0.0));
    }
}
