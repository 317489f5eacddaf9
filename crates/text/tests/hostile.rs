//! Bad input is a named error, never a panic.

use plimsoll_text::{
    ChatTemplate, Extra, GgufVocab, Message, TextError, Tokenizer, assistant_spans,
};
use proptest::prelude::*;

fn tiny_tokenizer_json() -> String {
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<unk>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "normalizer": {"type": "Prepend", "prepend": "_"},
        "pre_tokenizer": {"type": "Digits", "individual_digits": true},
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": true,
                  "vocab": {"<unk>": 0, "a": 1, "b": 2, "ab": 3},
                  "merges": [["a", "b"]]}
    })
    .to_string()
}

fn load(tokenizer: &[u8], config: &[u8]) -> Result<Tokenizer, TextError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    Tokenizer::from_dir(dir.path())
}

#[test]
fn directories_name_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let missing = Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    assert!(missing.contains("no tokenizer.json"), "{missing}");
    let good = tiny_tokenizer_json();
    let tok = load(good.as_bytes(), b"{}").unwrap();
    assert_eq!(tok.encode("ab1", false).unwrap(), [0, 3, 0]);
    for (config, needle) in [
        (&b"{"[..], "not valid JSON"),
        (br#"{"eos_token": "</s>"}"#, "`eos_token` is \"</s>\""),
        (br#"{"eos_token": 7}"#, "must be a token"),
        (br#"{"added_tokens_decoder": {"x": {"content": "y"}}}"#, "no id"),
        (br#"{"added_tokens_decoder": {"9": {"content": "y"}}}"#, "the id 9"),
    ] {
        let error = load(good.as_bytes(), config).unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    }
    // A merge longer than any token.
    let long = good.replace(r#"[["a","b"]]"#, r#"[["ab","ab"]]"#);
    assert_ne!(long, good);
    assert!(matches!(load(long.as_bytes(), b"{}"), Err(TextError::Tokenizer { .. })));
    // A declared token that tokenizer.json lacks is added.
    let config = br#"{"added_tokens_decoder": {"4": {"content": "<x>", "special": true}}, "eos_token": "<x>"}"#;
    let tok = load(good.as_bytes(), config).unwrap();
    assert_eq!((tok.vocab_size(), tok.eos()), (5, Some(4)));
    assert_eq!(tok.encode("<x>", false).unwrap(), [4]);
}

#[test]
fn gguf_vocabularies_name_what_is_wrong() {
    let tokens: Vec<String> = ["<unk>", "a", "b", "ab"].map(String::from).to_vec();
    let good = GgufVocab {
        model: "gpt2".into(),
        pre: Some("gpt2".into()),
        token_types: vec![2, 1, 1, 1],
        merges: vec!["a b".into()],
        tokens,
        ..GgufVocab::default()
    };
    let tok = Tokenizer::from_gguf(good.clone()).unwrap();
    assert_eq!(tok.encode("ab", false).unwrap(), [3]);
    let change = |f: fn(&mut GgufVocab)| {
        let mut vocab = good.clone();
        f(&mut vocab);
        Tokenizer::from_gguf(vocab).unwrap_err().to_string()
    };
    for (error, needle) in [
        (change(|v| v.tokens.clear()), "missing or empty"),
        (change(|v| v.token_types.push(1)), "token_type has 5 entries for 4"),
        (change(|v| v.bos = Some(4)), "bos_token_id is 4"),
        (change(|v| v.pre = Some("nonsense".into())), "`nonsense` is not known"),
        (change(|v| v.model = "t5".into()), "`t5` is not supported"),
        (change(|v| v.merges.push("ab".into())), "merges[1]"),
        (change(|v| v.merges.push("ab ab".into())), "\"abab\" is not a token"),
    ] {
        assert!(error.contains(needle), "{error}");
    }
    let mut scoreless = good.clone();
    scoreless.model = "llama".into();
    scoreless.merges.clear();
    let error = Tokenizer::from_gguf(scoreless).unwrap_err().to_string();
    assert!(error.contains("needs tokenizer.ggml.scores"), "{error}");
}

#[test]
fn every_named_pre_tokenizer_builds() {
    for pre in plimsoll_text::SUPPORTED_PRE {
        let vocab = GgufVocab {
            model: "gpt2".into(),
            pre: Some(pre.into()),
            tokens: (0..=255u8).map(|b| char::from(b).to_string()).collect(),
            ..GgufVocab::default()
        };
        let tok = Tokenizer::from_gguf(vocab).unwrap_or_else(|e| panic!("{pre}: {e}"));
        assert_eq!(tok.encode("ab'll", false).unwrap(), [97, 98, 39, 108, 108]);
    }
}

#[test]
fn an_ambiguous_turn_is_refused() {
    // Shows nothing of the first message unless there is a second one, twice.
    let template = ChatTemplate::new(
        "{% if messages|length > 1 %}{% for m in messages %}{{ m.content|upper ~ m.content|lower }}{% endfor %}{% endif %}",
        "",
        "",
    )
    .unwrap();
    let messages = [Message::user("q"), Message::assistant("Ab")];
    let error = assistant_spans(&template, &messages, &Extra::new(), &[]).unwrap_err();
    assert!(error.to_string().contains("message 2: cannot tell"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn damaged_tokenizer_files_never_panic(at in 0usize..700, byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = tiny_tokenizer_json().into_bytes();
        let at = at % bytes.len();
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        if let Ok(tok) = load(&bytes, b"{}") {
            let _ = tok.encode("ab 12 \u{20ac}", true);
            tok.decode(&[0, 1, 2, 3, 4], false);
        }
    }

    #[test]
    fn arbitrary_vocabularies_never_panic(
        llama in any::<bool>(),
        tokens in prop::collection::vec("[ab\u{2581}<]{0,4}", 0..12),
        types in prop::collection::vec(0i32..8, 0..12),
        scores in prop::collection::vec(any::<f32>(), 0..12),
        merges in prop::collection::vec("[ab ]{0,4}", 0..4),
        bos in prop::option::of(0u32..12),
    ) {
        let types_fit: Vec<i32> = types.iter().copied().cycle().take(if types.is_empty() { 0 } else { tokens.len() }).collect();
        let scores_fit: Vec<f32> = scores.iter().copied().cycle().take(if scores.is_empty() { 0 } else { tokens.len() }).collect();
        let vocab = GgufVocab {
            model: if llama { "llama" } else { "gpt2" }.into(),
            pre: Some("smollm".into()),
            tokens, token_types: types_fit, scores: scores_fit, merges, bos,
            ..GgufVocab::default()
        };
        if let Ok(tok) = Tokenizer::from_gguf(vocab) {
            let _ = tok.encode("ab ba <a 12 \u{20ac}", true);
            tok.decode(&[0, 5, 11, 99], false);
        }
    }

    #[test]
    fn arbitrary_templates_never_panic(source in "[{}% a-z'|.()\n-]{0,60}") {
        if let Ok(template) = ChatTemplate::new(&source, "", "") {
            let _ = template.render(&[Message::user("x")], true);
        }
    }

    #[test]
    fn spans_of_chatml_are_exact(contents in prop::collection::vec("[a-z<>|_ \n]{0,12}", 1..7)) {
        let tok = Tokenizer::byte_level();
        let template = plimsoll_text::chatml(&tok).unwrap().template;
        let roles = ["user", "assistant"].into_iter().cycle();
        let messages: Vec<Message> = contents.iter().zip(roles).map(|(c, r)| Message::new(r, c.clone())).collect();
        let (text, spans) = assistant_spans(&template, &messages, &Extra::new(), &["<|im_end|>"]).unwrap();
        let shown: Vec<String> = spans.into_iter().map(|s| text[s].to_string()).collect();
        let expected: Vec<String> = messages.iter().filter(|m| m.role == "assistant").map(|m| format!("{}<|im_end|>", m.content)).collect();
        prop_assert_eq!(shown, expected);
    }
}
