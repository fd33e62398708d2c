//! Figures in Prometheus' text format.

use std::collections::HashMap;

/// Values by name and labels, as in `moeflux_tokens_total{kind="prompt"}`; over all models.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metrics(HashMap<String, f64>);

impl Metrics {
    /// Reads a page of metrics; lines that are none are left out.
    pub fn parse(text: &str) -> Self {
        let mut values = HashMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            *values.entry(without_model(name.trim())).or_default() += value;
        }
        Self(values)
    }

    /// The value of `moeflux_NAME`; 0 if there is none.
    pub fn get(&self, name: &str) -> f64 {
        self.0.get(&format!("moeflux_{name}")).copied().unwrap_or(0.0)
    }
}

/// A name without the label of its model, which comes first.
fn without_model(name: &str) -> String {
    let Some((name, labels)) = name.split_once("{model=\"") else { return name.to_owned() };
    let mut escaped = false;
    let end = labels.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    match end.map(|end| labels[end + 1..].trim_start_matches(',')) {
        Some("}") | None => name.to_owned(),
        Some(others) => format!("{name}{{{others}"),
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

    #[test]
    fn models_are_added_up() {
        let page =
            "moeflux_a{model=\"x\"} 3\nmoeflux_a{model=\"y \\\" z\"} 4\nmoeflux_b{model=\"x\",c=\"d\"} 1\n";
        let metrics = Metrics::parse(page);
        assert_eq!((metrics.get("a"), metrics.get("b{c=\"d\"}")), (7.0, 1.0));
    }
}
