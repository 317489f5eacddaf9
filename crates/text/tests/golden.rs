//! Real tokenizers and templates against what transformers and Jinja2 produced.
//! The files are not in this repository; without them the tests say so and pass.

use plimsoll_text::{
    ChatTemplate, Extra, GgufVocab, Message, Tokenizer, assistant_spans, encode_chat,
};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PLIMSOLL_SHARED").map_or_else(
        || Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")).to_path_buf(),
        PathBuf::from,
    );
    let path = root.join(path);
    if !path.exists() {
        eprintln!("skipped: {} does not exist", path.display());
        return None;
    }
    Some(path)
}

fn json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// Varied texts: lines of the data files, and what tokenizers trip over.
fn texts() -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        "  two  spaces  and\ttabs\t\t",
        "trailing newline\n\n",
        "\r\n windows \r\n",
        "it's we'll I'M you'VE don't",
        "numbers 1 12 123 1234567890 3.14 1e-5 \u{0664}\u{0665} \u{00bd}",
        "caf\u{e9} na\u{ef}ve \u{20ac}100 \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c} \u{1f600}\u{1f468}\u{200d}\u{1f469}",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|> <|endoftext|>x",
        "<s>a</s> <unk>",
        "f(x) == y[0]; // !@#$%^&*()_+{}|:\"<>?~`",
        "\u{2581}underscore \u{0}\u{1}\u{7f}",
        "e\u{301} combining A\u{30a}",
    ]
    .map(String::from)
    .to_vec();
    for file in
        ["self_instruct_guanaco_style.jsonl", "tinyshakespeare.txt", "sharegpt_toolcall.json"]
    {
        let Some(path) = shared(&format!("data/{file}")) else { continue };
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = text.lines().filter(|l| !l.is_empty()).collect();
        let step = (lines.len() / 90).max(1);
        texts.extend(lines.into_iter().step_by(step).take(90).map(String::from));
    }
    texts
}

fn gguf_vocab(dir: &Path, model: &str, pre: Option<&str>) -> GgufVocab {
    let file = json(dir.join("tokenizer.json"));
    let mut tokens = vec![String::new(); file["model"]["vocab"].as_object().unwrap().len()];
    for (token, id) in file["model"]["vocab"].as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut token_types = vec![1; tokens.len()];
    for added in file["added_tokens"].as_array().unwrap() {
        token_types[added["id"].as_u64().unwrap() as usize] = 3;
    }
    let merges = file["model"]["merges"].as_array().unwrap();
    let merges = merges.iter().map(|pair| match pair {
        Value::String(text) => text.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    });
    GgufVocab {
        model: model.into(),
        pre: pre.map(String::from),
        tokens,
        token_types,
        merges: merges.collect(),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufVocab::default()
    }
}

#[test]
fn smollm2_prompts_and_answers() {
    let Some(dir) = shared("models/smollm2-135m-instruct") else { return };
    let tok = Tokenizer::from_dir(&dir).unwrap();
    let template = plimsoll_text::find_template(&dir, &tok).unwrap().template;
    assert_eq!(tok.vocab_size(), 49152);
    assert_eq!((tok.bos(), tok.eos(), tok.pad()), (Some(1), Some(2), Some(2)));
    assert_eq!(tok.stop_ids(), [2]);
    assert!(!tok.adds_bos() && !tok.adds_eos());
    let golden = json(dir.join("golden.json"));
    for chat in golden["chat"].as_array().unwrap() {
        let messages = [Message::user(chat["user"].as_str().unwrap())];
        let prompt = template.render(&messages, true).unwrap();
        assert_eq!(prompt, chat["rendered_prompt"].as_str().unwrap());
        let prompt_ids = ids(&chat["prompt_ids"]);
        assert_eq!(tok.encode(&prompt, true).unwrap(), prompt_ids);
        let greedy = ids(&chat["greedy_ids"]);
        let text = chat["greedy_text"].as_str().unwrap();
        assert_eq!(tok.decode(&greedy, true), text);
        let mut stream = tok.stream_after(&prompt_ids, true);
        let mut streamed: String = greedy.iter().map(|&id| stream.push(id)).collect();
        streamed += &stream.finish();
        assert_eq!(streamed, text);
        // The mask covers exactly the answer and its end-of-turn token.
        let full = [messages[0].clone(), Message::assistant(text)];
        let encoded = encode_chat(&tok, &template, &full).unwrap();
        let answer = encoded.ids.iter().zip(&encoded.assistant_mask);
        let answer: Vec<u32> = answer.filter(|(_, m)| **m).map(|(id, _)| *id).collect();
        let mut expected = tok.encode(text, false).unwrap();
        expected.push(2);
        assert_eq!(answer, expected);
        assert_eq!(encoded.ids[..prompt_ids.len()], prompt_ids);
    }
    let ppl = &golden["ppl"][0];
    assert_eq!(tok.encode(ppl["text"].as_str().unwrap(), false).unwrap(), ids(&ppl["ids"]));
}

#[test]
fn stories_prompt_and_answer() {
    let Some(dir) = shared("models/stories260K-hf") else { return };
    let tok = Tokenizer::from_dir(&dir).unwrap();
    assert_eq!((tok.vocab_size(), tok.bos(), tok.eos()), (512, Some(1), Some(2)));
    assert!(tok.adds_bos() && !tok.adds_eos());
    let golden = json(dir.join("golden.json"));
    assert_eq!(tok.encode("Once upon a time", true).unwrap(), ids(&golden["prompt_ids"]));
    let greedy = ids(&golden["greedy_ids_from_bos"]);
    let text = golden["greedy_text"].as_str().unwrap();
    assert_eq!(tok.decode(&greedy, true), text);
    let mut stream = tok.stream(true);
    let mut streamed: String = greedy.iter().map(|&id| stream.push(id)).collect();
    streamed += &stream.finish();
    assert_eq!(streamed, text);
}

#[test]
fn gguf_vocabularies_encode_as_tokenizer_json() {
    let (Some(smol), Some(stories)) =
        (shared("models/smollm2-135m-instruct"), shared("models/stories260K-hf"))
    else {
        return;
    };
    let bpe = gguf_vocab(&smol, "gpt2", Some("smollm"));
    // SentencePiece files carry scores instead of merges, in the order of the ids here.
    let mut scored = gguf_vocab(&stories, "llama", None);
    scored.merges.clear();
    scored.scores = (0..scored.tokens.len()).map(|id| -(id as f32)).collect();
    scored.token_types[3..259].fill(6);
    let mut compared = 0;
    for (dir, vocab) in [(smol, bpe), (stories, scored)] {
        let from_dir = Tokenizer::from_dir(&dir).unwrap();
        let from_gguf = Tokenizer::from_gguf(vocab).unwrap();
        assert_eq!(from_gguf.vocab_size(), from_dir.vocab_size());
        assert!(from_gguf.stop_ids().contains(&2));
        for text in texts() {
            let ids = from_dir.encode(&text, true).unwrap();
            assert_eq!(from_gguf.encode(&text, true).unwrap(), ids, "{text:?}");
            assert_eq!(from_gguf.decode(&ids, false), from_dir.decode(&ids, false));
            compared += 1;
        }
    }
    assert!(compared > 400, "{compared}");
}

#[test]
fn streaming_equals_decoding_at_once() {
    for dir in ["models/smollm2-135m-instruct", "models/stories260K-hf"] {
        let Some(dir) = shared(dir) else { return };
        let tok = Tokenizer::from_dir(&dir).unwrap();
        for text in texts() {
            let ids = tok.encode(&text, false).unwrap();
            for skip in [false, true] {
                let mut stream = tok.stream(skip);
                let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
                streamed += &stream.finish();
                assert_eq!(streamed, tok.decode(&ids, skip), "{text:?}");
            }
        }
    }
}

fn bos_eos(name: &str) -> (&'static str, &'static str) {
    match name {
        "llama3" | "llama3_1" => ("<|begin_of_text|>", "<|eot_id|>"),
        "gemma3" => ("<bos>", "<eos>"),
        "tinyllama-chat-zephyr" | "mistral-instruct-v0.2" | "llama2-chat" => ("<s>", "</s>"),
        _ => ("", "<|im_end|>"),
    }
}

fn template(name: &str) -> Option<ChatTemplate> {
    let path = shared(&format!("models/chat_templates/{name}.jinja"))?;
    let source = std::fs::read_to_string(path).unwrap();
    let (bos, eos) = bos_eos(name);
    Some(ChatTemplate::new(&source, bos, eos).unwrap())
}

#[test]
fn templates_render_as_jinja2_does() {
    let Some(path) = shared("models/chat_templates/rendered_by_jinja2.json") else { return };
    let golden = json(path);
    let multi: Vec<Message> = serde_json::from_value(golden["messages"].clone()).unwrap();
    let system = [Message::system("Be brief."), Message::user("Hi")];
    let mut compared = 0;
    for (name, renders) in golden["rendered"].as_object().unwrap() {
        let template = template(name).unwrap();
        for (case, expected) in renders.as_object().unwrap() {
            let messages: &[Message] = if case == "multi" { &multi } else { &system };
            let got = match template.render(messages, true) {
                Ok(text) => text,
                Err(plimsoll_text::TextError::TemplateRaised { message }) => message,
                Err(e) => panic!("{name} {case}: {e}"),
            };
            assert_eq!(got, expected.as_str().unwrap(), "{name} {case}");
            compared += 1;
        }
    }
    assert_eq!(compared, 18);
}

/// The assistant's spans of a three-turn conversation, as text.
#[test]
fn every_template_shows_what_the_assistant_says() {
    const SPECIALS: [&str; 12] = [
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
    ];
    let messages = [
        Message::user("Hi, assistant"),
        Message::assistant("assistant"), // also the role's name
        Message::user("Again?"),
        Message::assistant("Hi"), // also in the first question
        Message::user("And?"),
        Message::assistant(" Two\n\nlines \n"),
    ];
    let cases: [(&str, [&str; 3]); 9] = [
        ("llama3", ["assistant<|eot_id|>", "Hi<|eot_id|>", "Two\n\nlines<|eot_id|>"]),
        ("llama3_1", ["assistant<|eot_id|>", "Hi<|eot_id|>", "Two\n\nlines<|eot_id|>"]),
        ("gemma3", ["assistant<end_of_turn>", "Hi<end_of_turn>", "Two\n\nlines<end_of_turn>"]),
        ("llama2-chat", [" assistant </s>", " Hi </s>", " Two\n\nlines </s>"]),
        ("mistral-instruct-v0.2", ["assistant</s>", "Hi</s>", " Two\n\nlines \n</s>"]),
        ("smollm2-instruct", ["assistant<|im_end|>", "Hi<|im_end|>", " Two\n\nlines \n<|im_end|>"]),
        (
            "qwen1.5-chat-xenova",
            ["assistant<|im_end|>", "Hi<|im_end|>", " Two\n\nlines \n<|im_end|>"],
        ),
        ("tinyllama-chat-zephyr", ["assistant</s>", "Hi</s>", " Two\n\nlines \n</s>"]),
        (
            "qwen3",
            [
                "assistant<|im_end|>",
                "Hi<|im_end|>",
                "<think>\n\n</think>\n\n Two\n\nlines \n<|im_end|>",
            ],
        ),
    ];
    for (name, expected) in cases {
        let Some(template) = template(name) else { return };
        let (text, spans) =
            assistant_spans(&template, &messages, &Extra::new(), &SPECIALS).unwrap();
        let got: Vec<&str> = spans.into_iter().map(|s| &text[s]).collect();
        // The zephyr template ends its generation prompt before the newline.
        let got: Vec<&str> = got.iter().map(|s| s.trim_start_matches('\n')).collect();
        assert_eq!(got, expected, "{name}");
    }
}

#[test]
fn reasoning_and_tool_calls_are_the_assistants() {
    let Some(template) = template("qwen3") else { return };
    let mut call = Message::assistant("");
    call.tool_calls = Some(serde_json::json!([
        {"type": "function", "function": {"name": "f", "arguments": {"x": "\u{e9}"}}}
    ]));
    let messages = [
        Message::user("Hi"),
        Message::assistant("<think>\nHm.\n</think>\n\nYes."),
        Message::user("Call f"),
        call,
        Message::new("tool", "2"),
        Message::assistant("<think>\nSo 2.\n</think>\n\nIt is 2."),
    ];
    let specials = ["<|im_start|>", "<|im_end|>"];
    let (text, spans) = assistant_spans(&template, &messages, &Extra::new(), &specials).unwrap();
    let got: Vec<&str> = spans.into_iter().map(|s| &text[s]).collect();
    assert_eq!(
        got,
        [
            "Yes.<|im_end|>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"\u{e9}\"}}\n</tool_call><|im_end|>",
            "<think>\nSo 2.\n</think>\n\nIt is 2.<|im_end|>",
        ]
    );
}
