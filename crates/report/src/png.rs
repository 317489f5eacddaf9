//! Drawings as PNG, with a font of our own: the same picture on every machine.

use std::sync::{Arc, LazyLock};

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb::Database};

use crate::svg::{STYLE, static_style};

/// Pixels of a picture for one of the drawing.
const SCALE: f32 = 2.0;

/// Which of the two themes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Theme {
    #[default]
    Light,
    Dark,
}

static FONTS: LazyLock<Arc<Database>> = LazyLock::new(|| {
    let mut fonts = Database::new();
    fonts.load_font_data(epaint_default_fonts::UBUNTU_LIGHT.to_vec());
    let name = fonts.faces().next().and_then(|face| Some(face.families.first()?.0.clone()));
    fonts.set_sans_serif_family(name.unwrap_or_default());
    Arc::new(fonts)
});

/// A drawing of this crate as a PNG file; `None` if it is too large to paint.
pub fn png(svg: &str, theme: Theme) -> Option<Vec<u8>> {
    let (style, colours) = static_style(theme == Theme::Dark);
    let mut text = svg.replace(STYLE.as_str(), &style);
    for (name, value) in colours {
        text = text.replace(&format!("var(--{name})"), value);
    }
    let options =
        Options { fontdb: FONTS.clone(), font_family: "Ubuntu".to_owned(), ..Options::default() };
    let tree = Tree::from_str(&text, &options).ok()?;
    let size = tree.size().to_int_size().scale_by(SCALE)?;
    let mut picture = Pixmap::new(size.width(), size.height())?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut picture.as_mut());
    picture.encode_png().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svg::Svg;

    #[test]
    fn themes_and_text_are_painted() {
        let mut svg = Svg::new(100.0);
        svg.text(10.0, 20.0, "title", "start", "Memory (GiB)");
        svg.path(&[(0.0, 40.0), (50.0, 50.0)], 0, "");
        let svg = svg.finish(60.0, "a title");
        let painted = |theme| {
            let bytes = png(&svg, theme).unwrap();
            let picture = Pixmap::decode_png(&bytes).unwrap();
            assert_eq!((picture.width(), picture.height()), (200, 120));
            let corner = picture.pixel(199, 0).unwrap();
            // Where the title is.
            let inked = (20..180)
                .flat_map(|x| (20..44).map(move |y| (x, y)))
                .filter(|&(x, y)| picture.pixel(x, y) != Some(corner))
                .count();
            (corner.red(), inked)
        };
        let (light, ink) = painted(Theme::Light);
        assert!(light == 255 && ink > 100, "{light} {ink}");
        let (dark, ink) = painted(Theme::Dark);
        assert!(dark < 40 && ink > 100, "{dark} {ink}");
    }
}
