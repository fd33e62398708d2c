//! A live view of a server: [`Feed`] brings its figures, [`View`] keeps and draws them.

mod feed;
mod heat;
mod metrics;
mod view;

pub use feed::{Feed, Update};
pub use view::View;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;

/// Interval for polling the keyboard.
const TICK: Duration = Duration::from_millis(100);
/// Most time for a server to show what it does.
const PATIENCE: Duration = Duration::from_secs(10);
/// Size of a view that is printed, in characters.
const PRINTED: Rect = Rect { x: 0, y: 0, width: 100, height: 30 };

/// One view as text. Rates need two samples from the server.
pub fn once(feed: &Feed, view: &mut View) -> Result<String> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok(update) = feed.next(left) else {
            bail!("{}: no figures within {} seconds", view.url(), PATIENCE.as_secs());
        };
        match view.take(update) {
            Update::Refused(reason) | Update::Lost(reason) => bail!("{reason}"),
            Update::Figures { .. } if view.has_rates() => break,
            Update::Figures { .. } => {}
        }
    }
    let mut buffer = Buffer::empty(PRINTED);
    view.draw(PRINTED, &mut buffer, false);
    let lines = buffer.content().chunks(usize::from(PRINTED.width)).map(|cells| {
        let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
        line.trim_end().to_owned() + "\n"
    });
    Ok(lines.collect::<String>().trim_end().to_owned() + "\n")
}

/// Shows views on the terminal until `q`, Escape or Ctrl-C.
pub fn watch(feed: &Feed, view: &mut View) -> Result<()> {
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut terminal = ratatui::try_init().context("cannot use this terminal")?;
    let outcome = (|| {
        loop {
            while let Ok(update) = feed.next(Duration::ZERO) {
                view.take(update);
            }
            terminal.draw(|frame| view.draw(frame.area(), frame.buffer_mut(), colour))?;
            if event::poll(TICK)? && leaves(&event::read()?) {
                return Ok(());
            }
        }
    })();
    ratatui::restore();
    outcome
}

fn leaves(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    let leave = control_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc);
    key.kind == KeyEventKind::Press && leave
}
