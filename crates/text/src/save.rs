//! A tokenizer as the files of a Hugging Face model directory.

use crate::{TextError, Tokenizer};
use serde_json::{Value, json};
use tokenizers::processors::template::TemplateProcessing;

impl Tokenizer {
    /// `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`,
    /// names and contents, such that [`Tokenizer::from_dir`] and transformers
    /// read this tokenizer from them: for models whose own files are none of
    /// these, such as GGUF. `chat_template` is the source of the model's template.
    ///
    /// # Errors
    /// [`TextError::Save`], when a part has no form in `tokenizer.json`.
    pub fn to_files(
        &self,
        chat_template: Option<&str>,
    ) -> Result<Vec<(String, Vec<u8>)>, TextError> {
        let fail = |detail: String| TextError::Save { detail };
        let mut inner = self.inner.clone();
        inner.with_post_processor(self.template_processing().map_err(fail)?);
        let tokenizer = inner.to_string(false).map_err(|e| fail(e.to_string()))?;

        let token = |id: Option<u32>| id.and_then(|id| self.token(id));
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token(self.bos()),
            "eos_token": token(self.eos()),
            "pad_token": token(self.pad()),
            "clean_up_tokenization_spaces": false,
        });
        if let Some(template) = chat_template {
            config["chat_template"] = template.into();
        }
        let mut generation = json!({});
        for (key, id) in [("bos_token_id", self.bos()), ("pad_token_id", self.pad())] {
            if let Some(id) = id {
                generation[key] = id.into();
            }
        }
        if !self.stop_ids().is_empty() {
            generation["eos_token_id"] = self.stop_ids().into();
        }
        let text = |value: Value| format!("{value:#}\n").into_bytes();
        Ok(vec![
            ("tokenizer.json".into(), tokenizer.into_bytes()),
            ("tokenizer_config.json".into(), text(config)),
            ("generation_config.json".into(), text(generation)),
        ])
    }

    /// What puts the specials of `encode(.., true)` around a text.
    fn template_processing(&self) -> Result<Option<TemplateProcessing>, String> {
        let (before, after) = &self.around;
        if before.is_empty() && after.is_empty() {
            return Ok(None);
        }
        let spelled = |id: &u32| self.token(*id).ok_or_else(|| format!("id {id} has no token"));
        let before = before.iter().map(spelled).collect::<Result<Vec<_>, _>>()?;
        let after = after.iter().map(spelled).collect::<Result<Vec<_>, _>>()?;
        let named = before.iter().chain(&after);
        let ids = named.filter_map(|t| Some((t.clone(), self.token_to_id(t)?))).collect::<Vec<_>>();
        let single = [before, vec!["$A".to_owned()], after].concat();
        let mut builder = TemplateProcessing::builder();
        builder.try_single(single)?.special_tokens(ids);
        builder.build().map(Some).map_err(|e| e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find_template;

    #[test]
    fn what_is_written_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = Tokenizer::byte_level();
        for (name, bytes) in tokenizer.to_files(Some("{{ messages[0].content }}")).unwrap() {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let read = Tokenizer::from_dir(dir.path()).unwrap();
        for text in ["", "hello", " caf\u{e9}\n\n\t x", "<|im_start|>user<|im_end|>", "\u{1f6a2}"] {
            for specials in [false, true] {
                let ids = tokenizer.encode(text, specials).unwrap();
                assert_eq!(read.encode(text, specials).unwrap(), ids);
                assert_eq!(read.decode(&ids, specials), tokenizer.decode(&ids, specials));
            }
        }
        assert_eq!(read.bos(), tokenizer.bos());
        assert_eq!(read.eos(), tokenizer.eos());
        assert_eq!(read.pad(), tokenizer.pad());
        assert_eq!(read.stop_ids(), tokenizer.stop_ids());
        let template = find_template(dir.path(), &read).unwrap().template;
        assert_eq!(template.source(), "{{ messages[0].content }}");
    }
}
