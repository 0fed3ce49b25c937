// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pictures of what was measured, as SVG: lines over an axis, and bars in groups.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::path::Path;

/// In the order of what is drawn.
const COLOURS: [RGBColor; 4] =
    [RGBColor(120, 120, 120), RGBColor(0, 90, 180), RGBColor(215, 90, 0), RGBColor(20, 130, 60)];
/// Of four bars that are two pairs.
const PAIRS: [RGBColor; 4] =
    [RGBColor(150, 190, 230), RGBColor(0, 90, 180), RGBColor(245, 190, 140), RGBColor(215, 90, 0)];
const SIZE: (u32, u32) = (900, 480);
const FONT: &str = "sans-serif";

/// What stands around a picture.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below it, with the unit.
    pub x: &'a str,
    /// Left of it, with the unit.
    pub y: &'a str,
}

/// A line: its name and its points, from left to right.
pub type Line = (String, Vec<(f64, f64)>);

/// Lines over a vertical axis that begins at zero.
pub fn lines(path: &Path, frame: Frame<'_>, lines: &[Line]) -> Result<(), Box<dyn Error>> {
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let points = || lines.iter().flat_map(|(_, points)| points);
    let right = points().map(|(x, _)| *x).fold(0.0, f64::max);
    let left = points().map(|(x, _)| *x).fold(right, f64::min);
    let top = points().map(|(_, y)| *y).fold(0.0, f64::max) * 1.3;
    let mut chart = builder(&root, frame).build_cartesian_2d(left..right, 0.0..top)?;
    let mesh = &mut chart.configure_mesh();
    mesh.light_line_style(TRANSPARENT).x_label_formatter(&number).y_label_formatter(&number);
    mesh.x_desc(frame.x).y_desc(frame.y).label_style((FONT, 15)).draw()?;
    for (at, (name, points)) in lines.iter().enumerate() {
        // One that lies under another shows on both sides of it.
        let width = 2 + 2 * (lines.len() - 1 - at) as u32;
        let style = COLOURS[at % COLOURS.len()].stroke_width(width);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
    }
    let labels = &mut chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperRight).border_style(BLACK);
    labels.background_style(WHITE.mix(0.85)).label_font((FONT, 15)).draw()?;
    root.present()?;
    Ok(())
}

/// Bars side by side for each group, each with its value above it; `names` are those of the bars, in the order of a group's values. Four of them
/// are two pairs.
pub fn bars(
    path: &Path,
    frame: Frame<'_>,
    names: &[&str],
    groups: &[(String, Vec<f64>)],
) -> Result<(), Box<dyn Error>> {
    // As wide as the names below and the figures above need.
    let group = (42 * names.len() as u32).max(120);
    let size = (SIZE.0.max(100 + group * groups.len() as u32), SIZE.1);
    let colours = if names.len() == PAIRS.len() { PAIRS } else { COLOURS };
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    // The names of the bars have their place above the highest.
    let room = 1.05 + 0.1 * names.len() as f64;
    let top = groups.iter().flat_map(|(_, values)| values).copied().fold(0.0, f64::max) * room;
    let right = groups.len() as f64;
    let mut chart = builder(&root, frame).build_cartesian_2d(0.0..right, 0.0..top)?;
    let label = |x: &f64| {
        let at = x.floor() as usize;
        let is_middle = (x - x.floor() - 0.5).abs() < 0.01;
        groups.get(at).filter(|_| is_middle).map_or(String::new(), |(name, _)| name.clone())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .y_label_formatter(&number)
        .x_labels(2 * groups.len() + 1)
        .x_label_formatter(&label)
        .x_desc(frame.x)
        .y_desc(frame.y)
        .label_style((FONT, 15))
        .draw()?;
    let width = 0.8 / names.len() as f64;
    let above = Pos::new(HPos::Center, VPos::Bottom);
    let text = (FONT, 13).into_text_style(&root).pos(above);
    for (bar, name) in names.iter().enumerate() {
        let colour = colours[bar % colours.len()];
        let from = |at: usize| at as f64 + 0.1 + width * bar as f64;
        let rectangle = |(at, (_, values)): (usize, &(String, Vec<f64>))| {
            let end = (from(at) + width * 0.92, values[bar]);
            Rectangle::new([(from(at), 0.0), end], colour.filled())
        };
        let figure = |(at, (_, values)): (usize, &(String, Vec<f64>))| {
            let place = (from(at) + width * 0.46, values[bar] + top * 0.008);
            Text::new(three_figures(values[bar]), place, text.clone())
        };
        chart.draw_series(groups.iter().enumerate().map(figure))?;
        chart
            .draw_series(groups.iter().enumerate().map(rectangle))?
            .label(*name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
    }
    let labels = &mut chart.configure_series_labels();
    labels.position(SeriesLabelPosition::UpperRight).border_style(BLACK);
    labels.background_style(WHITE.mix(0.85)).label_font((FONT, 15)).draw()?;
    root.present()?;
    Ok(())
}

/// On an axis, as the library asks for it.
fn number(value: &f64) -> String {
    if value.fract().abs() < 0.001 { format!("{value:.0}") } else { format!("{value:.1}") }
}

/// Above a bar.
fn three_figures(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn builder<'a, 'b>(
    root: &'a DrawingArea<SVGBackend<'b>, Shift>,
    frame: Frame<'_>,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(root);
    builder.caption(frame.title, (FONT, 19)).margin(12);
    builder.x_label_area_size(45).y_label_area_size(70);
    builder
}
