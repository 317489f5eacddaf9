//! The self-contained page.

use crate::svg::{STYLE, escape};

const PAGE_STYLE: &str = "\
body{margin:0 auto;max-width:860px;padding:28px 18px 60px;background:var(--bg);color:var(--fg);\
font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,'Liberation Sans',sans-serif}\
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 8px}\
p.sub,dl,.notes{color:var(--muted)}\
dl{display:flex;flex-wrap:wrap;gap:2px 18px;font-size:13px;margin:6px 0}dl div{display:flex;gap:6px}dt:after{content:':'}dd{margin:0;color:var(--fg)}\
summary{cursor:pointer;color:var(--muted)}ul{padding-left:20px;margin:8px 0}li{margin:3px 0;overflow-wrap:anywhere}\
figure{margin:18px 0;overflow-x:auto}svg{display:block;width:100%;min-width:560px;height:auto}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}\
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--grid);vertical-align:top}\
th{font-weight:600;border-bottom-color:var(--frame);vertical-align:bottom}.word{text-align:left}td.word{max-width:340px;overflow-wrap:anywhere}\
.notes{font-size:13px}";

pub struct Page<'a> {
    pub title: &'a str,
    pub subtitle: &'a str,
    pub conclusions: &'a [String],
    /// Drawings as complete SVG, below a heading where it is not empty.
    pub charts: Vec<(&'a str, Vec<&'a str>)>,
    pub tables: Vec<Section<'a>>,
    pub notes: &'a [String],
}

/// One sweep.
pub struct Section<'a> {
    pub name: String,
    pub settings: &'a [(String, String)],
    pub table: String,
    pub rows: usize,
}

impl Page<'_> {
    pub fn html(&self) -> String {
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
             <meta name=\"color-scheme\" content=\"light dark\">\n\
             <title>{title}</title>\n<style>{style}{PAGE_STYLE}</style>\n</head>\n<body>\n\
             <h1>{title}</h1>\n<p class=\"sub\">{}</p>\n",
            escape(self.subtitle),
            title = escape(self.title),
            style = *STYLE
        );
        out += &list("Conclusions", "", self.conclusions);
        // A drawing by itself carries its style; here the page has it.
        let own_style = format!("<style>{}</style>\n", *STYLE);
        for (heading, charts) in &self.charts {
            if !heading.is_empty() {
                out += &format!("<h2>{}</h2>\n", escape(heading));
            }
            for chart in charts {
                out += &format!("<figure>{}</figure>\n", chart.replace(&own_style, ""));
            }
        }
        for section in &self.tables {
            out += &format!("<h2>{}</h2>\n", escape(&section.name));
            if !section.settings.is_empty() {
                out += "<dl>";
                for (setting, value) in section.settings {
                    let (setting, value) = (escape(setting), escape(value));
                    out += &format!("<div><dt>{setting}</dt><dd>{value}</dd></div>");
                }
                out += "</dl>\n";
            }
            // A long table would hide what follows it.
            out += &match section.rows {
                0..=60 => section.table.clone(),
                n => format!("<details><summary>{n} rows</summary>\n{}</details>\n", section.table),
            };
        }
        out += &list("Left out", "notes", self.notes);
        out + "</body>\n</html>\n"
    }
}

fn list(title: &str, class: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let items: String = lines.iter().map(|line| format!("<li>{}</li>\n", escape(line))).collect();
    format!("<h2>{title}</h2>\n<ul class=\"{class}\">\n{items}</ul>\n")
}
