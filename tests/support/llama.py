"""llama.cpp's own server as a program, with its names of flags, and models of random weights."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, CONTEXT = 64, 2, 4, 2048
POOLINGS = ("none", "mean")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_model(
    path: Path, *, width: int = WIDTH, layers: int = LAYERS, quantized: bool = False
) -> None:
    """Write a model that talks nonsense, always the same; if quantized, other nonsense."""
    hidden = 2 * width
    chance = np.random.default_rng(7)
    kind = gguf.GGMLQuantizationType.Q4_0 if quantized else gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // HEADS)
    letters = [chr(each) for each in range(ord(" "), ord("~") + 1)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    tokens += [f"\u2581{each}" for each in letters]
    kinds += [gguf.TokenType.NORMAL] * len(letters)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = chance.standard_normal(shape, dtype=np.float32) / np.sqrt(width)
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), width)
    add("output.weight", len(tokens), width)
    add("output_norm.weight", width)
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", width, width)
        add(f"blk.{layer}.ffn_gate.weight", hidden, width)
        add(f"blk.{layer}.ffn_up.weight", hidden, width)
        add(f"blk.{layer}.ffn_down.weight", width, hidden)
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_norm.weight", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    import xllamacpp  # noqa: PLC0415  # not for who only writes a model

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=POOLINGS)
    parser.add_argument("--metrics", action="store_true")
    given = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = given.model
    params.model_alias = {given.alias}
    params.port = given.port
    params.n_ctx = given.parallel * CONTEXT
    params.n_parallel = given.parallel
    params.embedding = given.embeddings
    if given.pooling is not None:
        params.pooling_type = xllamacpp.llama_pooling_type(POOLINGS.index(given.pooling))
    params.endpoint_metrics = given.metrics
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
