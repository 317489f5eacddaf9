//! Every format, and everything that can be wrong with a file.

use plimsoll_data::{Container, DataError, Example, Format, ReadOptions, read_bytes, read_files};
use proptest::prelude::*;
use std::path::Path;

fn read(name: &str, text: &str) -> Result<plimsoll_data::Dataset, DataError> {
    read_bytes(Path::new(name), text.as_bytes(), &ReadOptions::default())
}

/// The turns of all conversations as `role: content`.
fn turns(name: &str, text: &str, expected: Format) -> Vec<String> {
    let data = read(name, text).unwrap();
    assert_eq!(data.files[0].format, expected);
    let turns = data.examples.iter().flat_map(|example| match example {
        Example::Conversation(c) => c
            .messages
            .iter()
            .map(|m| match &m.tool_calls {
                Some(calls) => format!("{}: {} {calls}", m.role, m.content),
                None => format!("{}: {}", m.role, m.content),
            })
            .collect(),
        Example::Text { text, .. } => vec![format!("text: {text}")],
    });
    turns.collect()
}

#[test]
fn formats_are_detected_and_read() {
    assert_eq!(
        turns("a", r#"{"text": "plain ### Human: no"}"#, Format::Text),
        ["text: plain ### Human: no"]
    );
    assert_eq!(
        turns(
            "a",
            r####"{"text": "### Human: Hi\n### Assistant: Yo.### Human: Bye### Assistant: "}"####,
            Format::Guanaco
        ),
        ["user: Hi", "assistant: Yo.", "user: Bye", "assistant: "]
    );
    assert_eq!(
        turns(
            "a",
            r#"{"instruction": "Add", "input": "1 2", "output": "3", "system": "S"}"#,
            Format::Alpaca
        ),
        ["system: S", "user: Add\n\n1 2", "assistant: 3"]
    );
    assert_eq!(
        turns(
            "a",
            r#"{"instruction": "Add", "instances": [{"input": "", "output": "3"}, {"output": "4"}]}"#,
            Format::SelfInstruct
        ),
        ["user: Add", "assistant: 3", "user: Add", "assistant: 4"]
    );
    assert_eq!(
        turns("a", r#"{"prompt": "P", "completion": "C"}"#, Format::Prompt),
        ["user: P", "assistant: C"]
    );
    assert_eq!(
        turns(
            "a",
            r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
                {"role": "tool", "content": "2", "tool_call_id": "1"}, {"role": "assistant", "content": "It is 2."}]}"#,
            Format::Messages
        ),
        [
            "user: Hi",
            r#"assistant:  [{"id":"1","type":"function","function":{"name":"f","arguments":{"x":1}}}]"#,
            "tool: 2",
            "assistant: It is 2."
        ]
    );
    assert_eq!(
        turns(
            "a.json",
            r#"[{"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
                {"from": "observation", "value": "2"}, {"from": "gpt", "value": "Two."}], "tools": "[{\"name\": \"f\"}]"}]"#,
            Format::ShareGpt
        ),
        [
            "system: S",
            "user: Hi",
            r#"assistant:  [{"type":"function","function":{"name":"f","arguments":{}}}]"#,
            "tool: 2",
            "assistant: Two."
        ]
    );
    assert_eq!(turns("a.txt", "[1] {\"text\": 1}\n", Format::Raw), ["text: [1] {\"text\": 1}\n"]);
    assert_eq!(turns("a", "Once upon a time", Format::Raw), ["text: Once upon a time"]);
}

#[test]
fn containers() {
    let container = |name: &str, text: &str| {
        let data = read(name, text).unwrap();
        (data.files[0].container, data.examples.len(), data.places.clone())
    };
    let record = r#"{"text": "x"}"#;
    let lines = format!("{record}\r\n\n  \n{record}\n");
    assert_eq!(container("a.jsonl", &lines), (Container::JsonLines, 2, vec![(0, 1), (0, 4)]));
    assert_eq!(container("a", &lines).0, Container::JsonLines);
    let list = format!("\n[\n{record},\n\n{record}]\n");
    assert_eq!(container("a.json", &list), (Container::Json, 2, vec![(0, 3), (0, 5)]));
    assert_eq!(container("a", &list).0, Container::Json);
    let spread = "{\n\"text\":\n\"x\"}\n{\"text\": \"y\"}";
    assert_eq!(container("a.json", spread), (Container::Json, 2, vec![(0, 1), (0, 4)]));
    assert_eq!(container("a", &format!("\u{feff}{record}")).0, Container::JsonLines);
}

#[test]
fn a_bad_record_is_named_with_file_and_line() {
    let good = r#"{"instruction": "a", "output": "b"}"#;
    for (line, needle) in [
        (r#"{"instruction": "a", "output": 3}"#, "`output` must be a string, found a number"),
        (r#"{"instruction": "a"}"#, "`output` is missing; the keys are [instruction]"),
        (r#"{"instruction": " ", "output": "b"}"#, "`instruction` is empty"),
        (r#"["a"]"#, "expected an object, found a list"),
        (r#"{"instruction": "a""#, "the JSON breaks off"),
        (r#"{"instruction": nope}"#, "not JSON"),
        ("plain", "not JSON"),
    ] {
        let text = format!("{good}\n{line}\n{good}\n");
        let error = read("d/a.jsonl", &text).unwrap_err().to_string();
        assert!(error.starts_with("d/a.jsonl:2: ") && error.contains(needle), "{error}");
        let skip = ReadOptions { skip_bad: true, ..ReadOptions::default() };
        let data = read_bytes(Path::new("a.jsonl"), text.as_bytes(), &skip).unwrap();
        assert_eq!((data.examples.len(), data.files[0].bad), (2, 1));
        assert!(data.files[0].first_bad[0].starts_with("line 2: "), "{:?}", data.files[0]);
        assert!(data.files[0].to_string().contains("1 bad left out"));
    }
    for (record, needle) in [
        (
            r#"{"messages": [{"role": "bard", "content": "x"}]}"#,
            "messages[0]: unknown role \"bard\"",
        ),
        (r#"{"messages": [{"role": "user", "content": "x"}]}"#, "no turn of the assistant"),
        (r#"{"messages": [{"role": "user"}]}"#, "`content` is missing"),
        (r#"{"messages": [7]}"#, "messages[0]: must be an object"),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            "only text is trained",
        ),
        (
            r#"{"conversations": [{"from": "gpt", "value": "x"}], "tools": "{"}"#,
            "`tools` is a string that is not JSON",
        ),
        (r#"{"instruction": "a", "instances": []}"#, "`instances` is empty"),
        (
            r#"{"instruction": "a", "instances": [{"output": "b"}, {}]}"#,
            "instances[1]: `output` is missing",
        ),
        (
            r#"{"question": "a", "label": "b"}"#,
            "cannot tell the format from the keys [question, label]",
        ),
    ] {
        let error = read("a.jsonl", record).unwrap_err().to_string();
        assert!(error.contains(needle), "{error}");
    }
    let guanaco = ReadOptions { format: Some(Format::Guanaco), ..ReadOptions::default() };
    for (text, needle) in [
        ("no markers", "holds no `### Human:`"),
        ("### Human: alone", "holds no `### Assistant:`"),
        ("x ### Human: a### Assistant: b", "text stands before"),
    ] {
        let record = serde_json::json!({ "text": text }).to_string();
        let error = read_bytes(Path::new("a"), record.as_bytes(), &guanaco).unwrap_err();
        assert!(error.to_string().contains(needle), "{error}");
    }
}

#[test]
fn broken_files_are_named() {
    let error = |name: &str, bytes: &[u8]| {
        read_bytes(Path::new(name), bytes, &ReadOptions::default()).unwrap_err().to_string()
    };
    assert_eq!(error("a.jsonl", b""), "a.jsonl holds no example: it is empty");
    assert_eq!(error("a.txt", b" \n\n"), "a.txt holds no example: it is blank");
    assert_eq!(error("a.json", b"[]"), "a.json holds no example");
    assert!(
        error("a.json", b"[\n{\"text\": \"a\"},\n{\"text\": \"b\"")
            .contains("a.json:3: the JSON breaks off")
    );
    assert!(
        error("a.json", b"[{\"text\": \"a\"},\n")
            .contains("breaks off inside the list, after 1 records")
    );
    assert!(
        error("a.json", b"[{\"text\": \"a\"}\n{\"text\": \"a\"}]")
            .contains("a.json:2: expected `,` or `]`")
    );
    assert!(
        error("a.json", b"[{\"text\": \"a\"}]\nx").contains("a.json:2: something follows the list")
    );
    assert!(error("a.json", b"\n\n[{\"text\": nope}]").contains("a.json:3: not JSON"));
    assert!(
        error("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n")
            .contains("a.jsonl:2: not UTF-8: byte 0xff at offset 10")
    );
    assert!(
        error("a.txt", b"ok\nok \xe2\x28").contains("a.txt:2: not UTF-8: byte 0xe2 at offset 6")
    );
    let none: [&str; 0] = [];
    assert!(matches!(read_files(&none, &ReadOptions::default()), Err(DataError::NoFiles)));
    let missing = read_files(&["no/such.jsonl"], &ReadOptions::default()).unwrap_err();
    assert!(missing.to_string().contains("cannot read no/such.jsonl"));
    // Nothing but bad records is no data, even when they are skipped.
    let skip = ReadOptions { skip_bad: true, ..ReadOptions::default() };
    let error = read_bytes(Path::new("a.jsonl"), b"x\ny\n", &skip).unwrap_err().to_string();
    assert!(error.contains("2 records are bad; the first: line 1"), "{error}");
}

#[test]
fn names_of_formats_round_trip() {
    for name in Format::names() {
        assert_eq!(name.parse::<Format>().unwrap().to_string(), name);
    }
    assert!("yaml".parse::<Format>().unwrap_err().contains("guanaco"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80), name in "a(\\.json|\\.jsonl|\\.txt)?", skip_bad: bool) {
        let options = ReadOptions { skip_bad, format: None };
        let _ = read_bytes(Path::new(&name), &bytes, &options);
    }

    #[test]
    fn almost_json_never_panics(
        text in r####"(\[|\{|\}|\]|,|:|"text"|"messages"|"conversations"|"instances"|"instruction"|"output"|"from"|"value"|"role"|"user"|"gpt"|"### Human:"|1|null|\n| ){0,24}"####,
        name in "a(\\.json|\\.jsonl)?",
        skip_bad: bool,
        format in prop::option::of(0usize..8),
    ) {
        let format = format.and_then(|i| Format::names().nth(i)).map(|n| n.parse().unwrap());
        let _ = read_bytes(Path::new(&name), text.as_bytes(), &ReadOptions { skip_bad, format });
    }
}
