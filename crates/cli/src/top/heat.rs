//! [`HeatMap`]: how often experts were used recently, one row per layer.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use serde_json::Value;

/// Decay of an expert's heat from one sample to the next.
const DECAY: f64 = 0.85;
/// From cold to hot where there is no colour.
const SHADES: [char; 6] = [' ', '.', ':', '+', '#', '@'];
/// From cold to hot, in the palette of 256 colours.
const COLOURS: [u8; 8] = [232, 17, 19, 55, 126, 166, 214, 226];

/// Heat of every expert of every layer.
#[derive(Debug, Default)]
pub struct HeatMap {
    /// Number of the layer, and its experts' heat.
    layers: Vec<(u64, Vec<f64>)>,
}

impl HeatMap {
    /// Of a model as `/api/live` describes it.
    pub fn new(model: &Value) -> Self {
        let numbers = |key: &str| model[key].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let layers = numbers("layers").zip(numbers("experts"));
        Self {
            layers: layers
                .map(|(layer, experts)| (layer, vec![0.0; experts.min(1 << 16) as usize]))
                .collect(),
        }
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Adds how often each expert was needed since the last look; null is never.
    pub fn add(&mut self, heat: &Value) {
        let counts = heat.as_array().into_iter().flatten();
        for ((_, layer), counts) in self.layers.iter_mut().zip(counts) {
            layer.iter_mut().for_each(|heat| *heat *= DECAY);
            let counts = counts.as_array().into_iter().flatten().filter_map(Value::as_f64);
            layer.iter_mut().zip(counts).for_each(|(heat, count)| *heat += count);
        }
    }

    /// Draws as many layers as `area` has rows; where they are more, or a layer has more experts than there are columns,
    /// neighbours share a place and the hottest of them shows.
    pub fn draw(&self, area: Rect, buffer: &mut Buffer, colour: bool) {
        const LABEL: u16 = 4;
        if area.height == 0 || area.width <= LABEL || self.layers.is_empty() {
            return;
        }
        let rows = self.layers.len().min(usize::from(area.height));
        for row in 0..rows {
            let range = share(row, rows, self.layers.len());
            let label = format!("{:>3} ", self.layers[range.start].0);
            let y = area.y + row as u16;
            buffer.set_string(area.x, y, label, Style::default());
            let experts = self.layers[range.clone()].iter().map(|(_, heat)| heat.len()).max().unwrap_or(0);
            // Few experts get broad places.
            let columns = usize::from(area.width - LABEL);
            let breadth = (columns / experts.max(1)).clamp(1, 4);
            let places = experts.min(columns);
            for place in 0..places {
                let heat = self.layers[range.clone()].iter().map(|(_, heat)| {
                    let hottest = heat.iter().copied().fold(0.0, f64::max);
                    let there = heat.get(share(place, places, experts)).unwrap_or(&[]);
                    there.iter().copied().fold(0.0, f64::max) / hottest.max(1e-9)
                });
                let heat = heat.fold(0.0, f64::max);
                for column in 0..breadth {
                    let x = area.x + LABEL + (place * breadth + column) as u16;
                    if let Some(cell) = buffer.cell_mut((x, y)) {
                        if colour {
                            cell.set_char(' ').set_bg(Color::Indexed(level(heat, &COLOURS)))
                        } else {
                            cell.set_char(level(heat, &SHADES))
                        };
                    }
                }
            }
        }
    }
}

/// The part of `items` that `place` of `places` shows.
fn share(place: usize, places: usize, items: usize) -> std::ops::Range<usize> {
    place * items / places..((place + 1) * items / places).max(place * items / places + 1)
}

/// The step of a scale for a heat of 0..=1; anything that is not cold is seen.
fn level<T: Copy>(heat: f64, scale: &[T]) -> T {
    let steps = scale.len() - 1;
    scale[((heat * steps as f64).ceil() as usize).min(steps)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn drawn(map: &HeatMap, width: u16, height: u16) -> Vec<String> {
        let area = Rect { x: 0, y: 0, width, height };
        let mut buffer = Buffer::empty(area);
        map.draw(area, &mut buffer, false);
        let lines = buffer.content().chunks(usize::from(width));
        lines.map(|cells| cells.iter().map(ratatui::buffer::Cell::symbol).collect()).collect()
    }

    #[test]
    fn layers_and_experts_are_drawn() {
        let mut map = HeatMap::new(&json!({"layers": [1, 2, 5], "experts": [4, 4, 4]}));
        map.add(&json!([[10, 0, 5, 0], null, [0, 0, 0, 1]]));
        assert_eq!(drawn(&map, 8, 4), ["  1 @ + ", "  2     ", "  5    @", "        "]);
        // Two experts in one place, and two layers.
        assert_eq!(drawn(&map, 6, 2), ["  1 @+", "  2  @"]);
        assert_eq!(drawn(&map, 4, 2), ["    ", "    "]);
        map.add(&json!(null));
        map.add(&json!([[0, 100]]));
        assert_eq!(drawn(&map, 8, 3)[0], "  1 .@. ");
        HeatMap::new(&json!(3)).draw(Rect::ZERO, &mut Buffer::empty(Rect::ZERO), true);
    }
}
