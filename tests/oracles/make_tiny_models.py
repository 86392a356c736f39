"""Tiny random Qwen3-Next checkpoints in published layout, with oracles computed by transformers. Test material only.

`write_checkpoint` writes a directory that looks like a published checkpoint (config.json and safetensors under
published names, MTP module included); `make` adds oracle.safetensors (float32, eager, batch 1):

    prompt              [T]         prompt token ids
    logits              [T, V]      target logits of one full prefill
    hidden              [T, H]      what the MTP module is fed: hidden states after the final norm
    greedy              [G]         greedy continuation, every token by full recomputation
    mtp.teacher.tokens  [T]         t_1 .. t_T: the prompt shifted by one, then greedy[0]
    mtp.teacher.logits  [T, V]      MTP logits at every prompt position, teacher forced
    mtp.teacher.hidden  [T, H]      MTP hidden states that are recycled into the next draft
    mtp.draft.tokens    [GAMMA]     greedy chain of the module after the prompt
    mtp.draft.logits    [GAMMA, V]

The MTP module is a reference of its own, assembled from transformers' decoder layer and norm; transformers has none for
this family. Weights and prompts follow from the seed.

    python tests/oracles/make_tiny_models.py DIR [--agree 0.15] [--dtype bfloat16] [--seed 0]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

GAMMA = 4
PROMPT_LENGTH = 37  # odd on purpose: not a multiple of any chunk or page size
GREEDY_LENGTH = 8

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Every structural feature of the family, at sizes that tensor parallelism over 2 and 4 ranks can cut."""

OUT_PROJ = re.compile(r"\b(o_proj|out_proj|down_proj)(\.weight)?$")
KEEP_FLOAT32 = re.compile(r"A_log|dt_bias")


def randomize(module: nn.Module, generator: torch.Generator, zero_centred: set[str], tied: bool = False) -> None:
    """Weights whose logits are far from degenerate: unit-variance projections, norm gains that differ from 1, decays
    spread over short and long memory."""

    def normal(parameter: torch.Tensor, std: float = 1.0, mean: float = 0.0) -> None:
        parameter.copy_((torch.randn(parameter.shape, generator=generator) * std + mean).to(parameter.dtype))

    def uniform(parameter: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return torch.empty(parameter.shape).uniform_(low, high, generator=generator)

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "A_log":
                parameter.copy_(uniform(parameter, 0.2, 4.0).log())
            elif leaf == "dt_bias":
                step = uniform(parameter, math.log(0.01), math.log(0.5)).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            elif "norm" in name:
                normal(parameter, 0.2, 0.0 if name in zero_centred else 1.0)
            elif "conv1d" in name:
                normal(parameter, 0.5)
            elif "embed" in name:
                normal(parameter, 0.15 if tied else 1.0)  # keeps the input token of a tied table from winning
            else:
                normal(parameter, 1.0 / math.sqrt(parameter.shape[-1]))


def zero_centred_norms(module: nn.Module) -> set[str]:
    """Names of (1 + w) norms, which start at zero."""
    return {name for name, p in module.named_parameters() if "norm" in name and bool((p == 0).all())}


def build_target(overrides: dict[str, Any], seed: int) -> Any:
    config = AutoConfig.for_model("qwen3_next", **(BASE | overrides))
    lm = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    lm.set_experts_implementation("eager")
    randomize(lm, torch.Generator().manual_seed(seed), zero_centred_norms(lm), config.tie_word_embeddings)
    lm.tie_weights()
    return lm.eval()


class MtpHead(nn.Module):
    """The MTP module over a target's embedding, rotary table and output head."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        config = copy.deepcopy(lm.config)
        config.layer_types, config.num_hidden_layers = ["full_attention"], 1
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
        layer, norm = type(lm.model.layers[0]), type(lm.model.norm)
        h, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.final_norm = (norm(h, eps=eps) for _ in range(3))
        self.proj = nn.Linear(2 * h, h, bias=False)
        self.blocks = nn.ModuleList([layer(config, 0)])
        # In lists, so that the shared modules stay outside this module's tree.
        self._embed = [lm.get_input_embeddings()]
        self._head = [lm.get_output_embeddings()]
        self._rotary = [lm.model.rotary_emb]
        self.eval()

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens[i] = t_{i+1} and hidden[i] = h_i after the final norm, for all positions at once.

        Position ids are i; with rotary attention only differences matter. Returns (logits [T, V], hidden states to
        recycle [T, H]).
        """
        length = tokens.shape[0]
        e, h = self.enorm(self._embed[0](tokens)[None]), self.hnorm(hidden[None])
        x = self.proj(torch.cat([e, h], dim=-1))
        position = torch.arange(length)
        unseen = position[None, :] > position[:, None]
        mask = torch.zeros(1, 1, length, length).masked_fill(unseen, torch.finfo(torch.float32).min)
        rotary = self._rotary[0](x, position_ids=position[None])
        for block in self.blocks:
            x = block(x, attention_mask=mask, position_ids=position[None], position_embeddings=rotary)
            x = x[0] if isinstance(x, tuple) else x
        y = self.final_norm(x)
        return self._head[0](y)[0], y[0]


PUBLISHED_MTP = (
    ("enorm.", "mtp.pre_fc_norm_embedding."),
    ("hnorm.", "mtp.pre_fc_norm_hidden."),
    ("proj.", "mtp.fc."),
    ("final_norm.", "mtp.norm."),
    ("blocks.", "mtp.layers."),
)


def published_mtp(mtp: MtpHead) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in mtp.state_dict().items():
        own, published = next(pair for pair in PUBLISHED_MTP if name.startswith(pair[0]))
        out[published + name.removeprefix(own)] = tensor
    return dict(unfuse_experts(out))


def unfuse_experts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """[E, 2I, H] and [E, H, I] stacks → one tensor per expert, as checkpoints store them."""
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for e, expert in enumerate(tensor):
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2, 0)
                yield f"{base}.{e}.gate_proj.weight", gate
                yield f"{base}.{e}.up_proj.weight", up
            else:
                yield f"{base}.{e}.down_proj.weight", expert


def make_agree(lm: Any, mtp: MtpHead, scale: float) -> None:
    """Random modules never agree with their target, so no draft would ever be accepted. Shrinks every block's
    contribution on both sides and lets the module pass the token's embedding through, with a tenth of the hidden state:
    both become nearly a function of the last token, and many drafts, not all, are accepted."""
    for module in (lm, mtp):
        for name, parameter in module.named_parameters():
            if OUT_PROJ.search(name):
                parameter.data.mul_(scale)
    h = mtp.proj.weight.shape[0]
    mtp.proj.weight.data.copy_(torch.cat([torch.eye(h), 0.1 * torch.eye(h)], 1))
    mtp.final_norm.weight.data.copy_(lm.model.norm.weight.data)
    mtp.enorm.weight.data.zero_()


@torch.no_grad()
def run_target(lm: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass of [T] ids without a cache → (logits [T, V], hidden states after the final norm [T, H])."""
    out = lm(input_ids=ids[None], use_cache=False, output_hidden_states=True)
    return out.logits[0].float(), out.hidden_states[-1][0].float()


def greedy(lm: Any, prompt: torch.Tensor, count: int) -> torch.Tensor:
    ids = prompt
    for _ in range(count):
        logits, _ = run_target(lm, ids)
        ids = torch.cat([ids, logits[-1].argmax()[None]])
    return ids[len(prompt) :]


@torch.no_grad()
def draft_chain(mtp: MtpHead, tokens: torch.Tensor, hidden: torch.Tensor, gamma: int) -> tuple[torch.Tensor, ...]:
    """gamma greedy drafts. The first runs over the target's hidden states; each later one appends a position whose
    hidden state is the module's own output, so K/V of the real positions stay those of the first: the semantics of a
    drafter that owns a KV cache."""
    drafts, rows = [], []
    for _ in range(gamma):
        logits, recycled = mtp(tokens, hidden)
        drafts.append(logits[-1].argmax())
        rows.append(logits[-1])
        tokens = torch.cat([tokens, drafts[-1][None]])
        hidden = torch.cat([hidden, recycled[-1:]])
    return torch.stack(drafts), torch.stack(rows)


@torch.no_grad()
def oracle(lm: Any, mtp: MtpHead, prompt: torch.Tensor) -> dict[str, torch.Tensor]:
    """The reference values of the module's docstring."""
    logits, hidden = run_target(lm, prompt)
    continuation = greedy(lm, prompt, GREEDY_LENGTH)
    tokens = torch.cat([prompt[1:], continuation[:1]])
    teacher_logits, teacher_hidden = mtp(tokens, hidden)
    drafts, draft_logits = draft_chain(mtp, tokens, hidden, GAMMA)
    return {
        "prompt": prompt,
        "logits": logits,
        "hidden": hidden,
        "greedy": continuation,
        "mtp.teacher.tokens": tokens,
        "mtp.teacher.logits": teacher_logits,
        "mtp.teacher.hidden": teacher_hidden,
        "mtp.draft.tokens": drafts,
        "mtp.draft.logits": draft_logits,
    }


def write_checkpoint(
    directory: Path,
    overrides: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agree: float = 0.0,
) -> tuple[Any, MtpHead]:
    """Writes config and weights into `directory`; returns transformers' model and the MTP module, both in float32.

    overrides: fields of config.json that differ from BASE.
    agree: 0 leaves weights random; a scale such as 0.15 makes many drafts agree with the target.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    lm = build_target(overrides or {}, seed)
    mtp = MtpHead(lm)
    # All (1 + w) norms of the module but none of a Gated DeltaNet layer, which it has not.
    randomize(mtp, torch.Generator().manual_seed(seed + 1), {n for n, _ in mtp.named_parameters() if "norm" in n})
    if agree:
        make_agree(lm, mtp, agree)
    for parameter in (*lm.parameters(), *mtp.parameters()):
        parameter.data = parameter.data.to(dtype).float()  # oracle and checkpoint hold the same values

    lm.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path) | published_mtp(mtp)
    stored = {
        name: tensor.to(torch.float32 if KEEP_FLOAT32.search(name) else dtype).contiguous().clone()
        for name, tensor in tensors.items()
    }
    save_file(stored, path, metadata={"format": "pt"})
    config_path = directory / "config.json"
    config = json.loads(config_path.read_text())
    config |= {"dtype": str(dtype).removeprefix("torch."), "num_nextn_predict_layers": 1}
    config_path.write_text(json.dumps(config, indent=1, sort_keys=True))
    return lm, mtp


def make(
    directory: Path,
    overrides: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agree: float = 0.0,
) -> dict[str, torch.Tensor]:
    """`write_checkpoint` with the same arguments, and its oracle beside it; returns the oracle."""
    lm, mtp = write_checkpoint(directory, overrides, seed=seed, dtype=dtype, agree=agree)
    generator = torch.Generator().manual_seed(seed + 2)
    prompt = torch.randint(3, lm.config.vocab_size, (PROMPT_LENGTH,), generator=generator)
    values = oracle(lm, mtp, prompt)
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, directory / "oracle.safetensors")
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--agree", type=float, default=0.0, metavar="SCALE")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = make(
        arguments.directory, seed=arguments.seed, dtype=getattr(torch, arguments.dtype), agree=arguments.agree
    )
    accepted = (values["mtp.draft.tokens"] == values["greedy"][1 : 1 + GAMMA]).long().cumprod(0).sum()
    print(f"wrote {arguments.directory}: logits deviate by {values['logits'].std():.3f}, {accepted} drafts accepted")


if __name__ == "__main__":
    main()
