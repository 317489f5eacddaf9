"""The peer of scripts/bench-cpu: SmolLM2-135M's shape in transformers on the CPU, float32, random weights.

  python3 bench_torch_cpu.py train BATCH SEQ STEPS     seconds a full training step (median)
  python3 bench_torch_cpu.py generate NEW              decoded tokens a second, batch 1, greedy
Prints one JSON object.
"""
import json
import os
import statistics
import sys
import time

import torch
import transformers

torch.set_num_threads(int(os.environ.get("PLIMSOLL_THREADS", "2")))
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5, tie_word_embeddings=True)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def train(batch, seq, steps):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times = []
    for step in range(steps + 1):
        ids = torch.randint(3, config.vocab_size, (batch, seq))
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return {"seconds_per_iteration": statistics.median(times[1:])}


def generate(new):
    model.eval()
    ids = torch.randint(3, config.vocab_size, (1, 16))
    options = dict(do_sample=False, pad_token_id=0)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        # The prompt's share is taken off: what is compared is decoding.
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=1, min_new_tokens=1, **options)
        first = time.perf_counter() - start
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options)
        rest = time.perf_counter() - start - first
    return {"tokens_per_second": (new - 1) / rest}


if sys.argv[1] == "train":
    result = train(*map(int, sys.argv[2:5]))
else:
    result = generate(int(sys.argv[2]))
print(json.dumps(dict(result, torch=torch.__version__, transformers=transformers.__version__)))
