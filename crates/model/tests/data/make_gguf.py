"""Writes blocks.gguf: a tiny Llama in mixed types, and one matrix of every
block type made of random bytes, each beside the float32 values that the gguf
package computes (`expected.NAME`; for the model, in Hugging Face's row order).

    pip install gguf numpy && python make_gguf.py
"""

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

rng = np.random.default_rng(7)
C, I, L, H, HKV, V = 64, 96, 1, 4, 2, 40
D = C // H

w = GGUFWriter("blocks.gguf", "llama")
w.add_context_length(131072)
w.add_embedding_length(C)
w.add_block_count(L)
w.add_feed_forward_length(I)
w.add_head_count(H)
w.add_head_count_kv(HKV)
w.add_rope_freq_base(500000.0)
w.add_rope_dimension_count(D)
w.add_layer_norm_rms_eps(1e-5)
w.add_tokenizer_model("gpt2")
w.add_token_list([f"t{i}" for i in range(V - 1)] + ["\u00e9"])
w.add_token_scores([0.5 * i for i in range(V)])
w.add_token_types([1] * V)
w.add_token_merges(["t 1", "t 2"])
w.add_bos_token_id(1)
w.add_eos_token_id(2)
w.add_chat_template("{{ messages }}")
w.add_add_bos_token(True)


def add(name, values, kind, expected_name, pairs=None):
    """Quantizes HF-ordered `values`, permuting rows as llama.cpp does."""
    order = np.arange(values.shape[0])
    if pairs:
        order = order.reshape(pairs, 2, -1).swapaxes(1, 2).reshape(-1)
    data = quantize(values[order], kind)
    w.add_tensor(name, data, raw_dtype=kind)
    back = np.empty_like(values)
    back[order] = dequantize(data, kind)
    w.add_tensor("expected." + expected_name, back)


def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


add("token_embd.weight", normal(V, C), Q.Q8_0, "model.embed_tokens.weight")
add("output_norm.weight", normal(C), Q.F32, "model.norm.weight")
b, m = "blk.0.", "model.layers.0."
add(b + "attn_norm.weight", normal(C), Q.F32, m + "input_layernorm.weight")
add(b + "attn_q.weight", normal(H * D, C), Q.Q4_0, m + "self_attn.q_proj.weight", H)
add(b + "attn_k.weight", normal(HKV * D, C), Q.Q5_1, m + "self_attn.k_proj.weight", HKV)
add(b + "attn_v.weight", normal(HKV * D, C), Q.F16, m + "self_attn.v_proj.weight")
add(b + "attn_output.weight", normal(C, H * D), Q.BF16, m + "self_attn.o_proj.weight")
add(b + "ffn_norm.weight", normal(C), Q.F32, m + "post_attention_layernorm.weight")
add(b + "ffn_gate.weight", normal(I, C), Q.Q4_1, m + "mlp.gate_proj.weight")
add(b + "ffn_up.weight", normal(I, C), Q.Q5_0, m + "mlp.up_proj.weight")
add(b + "ffn_down.weight", normal(C, I), Q.Q8_0, m + "mlp.down_proj.weight")

# As llama.cpp's converter computes it for factor 8, 1, 4, 8192.
factors = []
for f in 1.0 / (500000.0 ** (np.arange(0, D, 2, dtype=np.float32) / D)):
    wavelen = 2 * np.pi / f
    if wavelen < 8192 / 4:
        factors.append(1)
    elif wavelen > 8192:
        factors.append(8)
    else:
        smooth = (8192 / wavelen - 1) / (4 - 1)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
w.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))

# Where each type keeps its half-precision numbers, which must be finite.
HALVES = {Q.Q4_0: [0], Q.Q4_1: [0, 2], Q.Q5_0: [0], Q.Q5_1: [0, 2], Q.Q8_0: [0], Q.Q2_K: [80, 82],
          Q.Q3_K: [108], Q.Q4_K: [0, 2], Q.Q5_K: [0, 2], Q.Q6_K: [208]}
for kind, halves in HALVES.items():
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (3, 512 // block, size), dtype=np.uint8)
    for at in halves:
        data[..., at : at + 2] = normal(3, 512 // block, 1).astype(np.float16).view(np.uint8)
    data = data.reshape(3, -1)
    w.add_tensor("random." + kind.name, data, raw_dtype=kind)
    w.add_tensor("expected.random." + kind.name, dequantize(data, kind))

w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
