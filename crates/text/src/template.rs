//! Chat templates: Jinja, set up as transformers sets it up.

use crate::{Message, TextError, date, python};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat;

/// Further variables of a template: `tools`, `documents`, `enable_thinking`, ...
pub type Extra = serde_json::Map<String, serde_json::Value>;

/// A parsed chat template. `Send + Sync`.
///
/// Matches `apply_chat_template` of transformers (`chat_template_utils.py`, 5.x):
/// `trim_blocks`, `lstrip_blocks`, `break`/`continue`, Python's string, list and
/// dict methods, `raise_exception`, `strftime_now` (in UTC), and `tojson` as
/// `json.dumps(ensure_ascii=False)`. `{% generation %}` marks are accepted and
/// have no effect.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

/// Carries the text given to `raise_exception` through the engine's error.
#[derive(Debug)]
struct Raised(String);

impl std::fmt::Display for Raised {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<Value, Error> {
    let kind = ErrorKind::InvalidOperation;
    Err(Error::new(kind, message.clone()).with_source(Raised(message)))
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses a template. `bos` and `eos` are the texts of `bos_token` and
    /// `eos_token`, empty where the model has none.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn new(template: &str, bos: &str, eos: &str) -> Result<ChatTemplate, TextError> {
        let syntax_error = |e: Error| TextError::TemplateSyntax {
            line: e.line().unwrap_or(0),
            detail: e.detail().map_or_else(|| e.to_string(), str::to_string),
        };
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(syntax_error)?;
        env.set_syntax(syntax);
        env.set_unknown_method_callback(pycompat::unknown_method_callback);
        env.set_formatter(|out, state, value| {
            if value.kind() == ValueKind::Number && !value.is_integer() {
                let x = f64::try_from(value.clone())?;
                return Ok(out.write_str(&python::float(x))?);
            }
            minijinja::escape_formatter(out, state, value)
        });
        env.add_function("raise_exception", raise_exception);
        env.add_filter("tojson", python::tojson);
        env.add_template_owned(NAME, without_generation_marks(template)).map_err(syntax_error)?;
        let mut parsed = ChatTemplate {
            env,
            source: template.to_string(),
            bos: bos.to_string(),
            eos: eos.to_string(),
        };
        parsed.set_clock(None);
        Ok(parsed)
    }

    /// Fixes what `strftime_now` answers, in seconds since 1970 (UTC); `None` is
    /// the current time. Training fixes it, so that a resumed run sees the same text.
    pub fn set_clock(&mut self, seconds: Option<i64>) {
        self.env.add_function("strftime_now", move |format: String| {
            date::strftime(&format, seconds.unwrap_or_else(date::now))
        });
    }

    /// The text of a conversation; with `add_generation_prompt` the opening of
    /// the assistant's next turn follows.
    ///
    /// # Errors
    /// [`TextError::TemplateRaised`] where the template refuses the conversation,
    /// [`TextError::TemplateRender`] where it fails.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TextError> {
        self.render_with(messages, add_generation_prompt, &Extra::new())
    }

    /// [`ChatTemplate::render`] with further variables, which take precedence.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`].
    pub fn render_with(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        extra: &Extra,
    ) -> Result<String, TextError> {
        let own = [
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
        ];
        let own = own.into_iter().filter(|(name, _)| !extra.contains_key(*name));
        let extra = extra.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let context = Value::from_pairs(own.chain(extra));
        self.env
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|e| render_error(&e))
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template mentions `name`, a variable or a field such as
    /// `tools`, `tool_calls` or the role `tool`.
    pub fn mentions(&self, name: &str) -> bool {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        self.source.match_indices(name).any(|(at, _)| {
            !self.source[..at].ends_with(word) && !self.source[at + name.len()..].starts_with(word)
        })
    }
}

fn render_error(error: &Error) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            let message = message.clone();
            return TextError::TemplateRaised { message };
        }
        source = cause.source();
    }
    let detail = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    TextError::TemplateRender { line: error.line().unwrap_or(0), detail }
}

/// `{% generation %}` ... `{% endgeneration %}` is transformers' own block tag.
/// As `{% if true %}` ... `{% endif %}` it has no effect but keeps the tag's
/// whitespace control.
fn without_generation_marks(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let Some(close) = tag.find("%}") else { break };
        let inside = &tag[..close];
        let name = inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let instead = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&inside.replacen(name, instead, 1));
        rest = &tag[close..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn show(template: &str, extra: serde_json::Value) -> String {
        let extra = extra.as_object().cloned().unwrap_or_default();
        ChatTemplate::new(template, "<s>", "</s>")
            .and_then(|t| t.render_with(&[Message::user("Hi")], true, &extra))
            .unwrap_or_else(|e| format!("error: {e}"))
    }

    #[test]
    fn json_as_python_writes_it() {
        let x = json!({"x": {"b": "<a> & 'q' \"d\" \u{e9}\n", "a": [1, 2.5, 1e-5, null, true, {}], "e": []}});
        assert_eq!(
            show("{{ x | tojson }}", x.clone()),
            r#"{"b": "<a> & 'q' \"d\" EACUTE\n", "a": [1, 2.5, 1e-05, null, true, {}], "e": []}"#
                .replace("EACUTE", "\u{e9}")
        );
        assert_eq!(
            show("{{ x.a | tojson(indent=2) }}", x.clone()),
            "[\n  1,\n  2.5,\n  1e-05,\n  null,\n  true,\n  {}\n]"
        );
        assert_eq!(
            show("{{ x.b | tojson(ensure_ascii=true) }}", x.clone()),
            r#""<a> & 'q' \"d\" \u00e9\n""#
        );
        assert_eq!(
            show("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", x),
            r#"{"a":2,"b":1}"#
        );
    }

    #[test]
    fn generation_marks_have_no_effect_but_keep_whitespace_control() {
        let marked = "a\n  {%- generation -%}\n b {% endgeneration %}\nc{% generation %}\nd{% endgeneration %}";
        let plain = "a\n  {%- if 1 -%}\n b {% endif %}\nc{% if 1 %}\nd{% endif %}";
        assert_eq!(show(marked, json!({})), show(plain, json!({})));
        assert_eq!(show(marked, json!({})), "ab cd");
    }

    #[test]
    fn python_methods_loop_controls_and_printing() {
        let t = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}";
        assert_eq!(show(t, json!({})), "023");
        assert_eq!(show("{{ ' a b '.strip().split(' ')[-1].upper() }}", json!({})), "B");
        assert_eq!(
            show("{{ true }} {{ none }} {{ 1e-5 }} {{ 2.0 }}", json!({})),
            "True None 1e-05 2.0"
        );
        assert_eq!(show("{{ tools is none }}{{ x is defined }}", json!({})), "TrueFalse");
        assert_eq!(show("{{ bos_token }}{{ bos_token }}", json!({"bos_token": "B"})), "BB");
    }

    #[test]
    fn errors_are_named() {
        assert_eq!(
            show("{{ raise_exception('no system role') }}", json!({})),
            "error: the chat template refuses this conversation: no system role"
        );
        assert!(
            show("a\n{% if %}", json!({}))
                .starts_with("error: chat template does not parse, line 2")
        );
        assert!(
            show("\n{{ 1 + 'a' }}", json!({})).starts_with("error: chat template failed, line 2")
        );
    }

    #[test]
    fn the_clock_can_be_fixed() {
        let mut t = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}", "", "").unwrap();
        t.set_clock(Some(1_721_952_000));
        assert_eq!(t.render(&[], false).unwrap(), "26 Jul 2024");
    }
}
