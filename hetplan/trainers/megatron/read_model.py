"""The model that a launch of Megatron-LM, or of a trainer made from it, describes.

Shapes have Megatron-LM's defaults where the launch leaves them out: megatron/training/arguments.py
(validate_args, moe_freq_type) and megatron/core/transformer/transformer_config.py of d98e8a64.
Epsilons, functions, positions and routers are only what the launch gives; rotary constants are of
megatron/core/models/common/embeddings/rotary_pos_embedding.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hetplan.errors import InputError
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    Norm,
    TransformerLayer,
)
from hetplan.model.numerics import (
    Activation,
    RotaryScaling,
    RotaryScalingKind,
    Router,
    ScoreFunction,
)
from hetplan.model.spec import MAX_LAYERS, ModelSpec
from hetplan.trainers.launch_values import (
    LaunchText,
    Setting,
    count_of,
    fault_of,
    flag,
    fraction_of,
    is_set,
    number_of,
    word_of,
    wrong,
)

_TERM = re.compile(r"\s*\[\s*([01](?:\s*,\s*[01])*)\s*\]\s*(?:\*\s*(\d{1,6})\s*)?")
GPT2_VOCABULARY = 50257
"""Words of gpt2-vocab.json."""
_WINDOW = re.compile(r"\(?\s*(\d{1,9})\s*,\s*(?:0|-1)\s*\)?")


def launch_model(text: LaunchText, name: str) -> ModelSpec:
    """The model that the arguments describe, under this name.

    An InputError where a size is missing, is known to the host only, or is a part that model files
    say and these arguments do not.
    """
    if text.trainer == "torchtitan":
        message = "torchtitan's models stand in Python, not in a launch; give --model FILE"
        raise InputError(fault_of(flag(text, "config"), text, message))
    layers, hidden = _needed(text, "num-layers"), _needed(text, "hidden-size")
    vocabulary = _vocabulary(text)
    if layers > MAX_LAYERS:
        message = f"{layers:,}; a model has at most {MAX_LAYERS:,} layers"
        raise InputError(fault_of(flag(text, "num-layers"), text, message))
    norm = (
        Norm.RMS_NORM
        if word_of(text, "LayerNorm", "normalization") == "RMSNorm"
        else (Norm.LAYER_NORM)
    )
    attention = _attention(text, hidden)
    dense = _dense(text, hidden)
    experts = _experts(text, dense)
    layer = TransformerLayer(attention=attention, mlp=dense, norm=norm)
    rows = [layer] * layers
    if experts is not None:
        pattern = _pattern(text, "moe-layer-freq", layers)
        rows = [replace(layer, mlp=experts if each else dense) for each in pattern]
    rows = _windows(text, rows)
    runs: list[LayerRun] = []
    for each in rows:
        if runs and runs[-1].layer == each:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            runs.append(LayerRun(count=1, layer=each))
    predictions = number_of(text, 0, "mtp-num-layers", least=0) or 0
    longest = count_of(text, count_of(text, 1, "seq-length"), "max-position-embeddings")
    learned = not _rotary(text) and _positions(text) == "learned_absolute"
    model = ModelSpec(
        name=name,
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_sequence_length=longest,
        layer_runs=tuple(runs),
        final_norm=norm,
        learned_positions=longest if learned else 0,
        tied_embeddings=not is_set(text, "untie-embeddings-and-output-weights"),
        num_mtp_layers=predictions,
        mtp_layer=rows[-1] if predictions else None,
    )
    rotary = _rotary(text) or isinstance(attention, LatentAttention)
    return _with_numerics(model, text, rotary=rotary)


def _needed(text: LaunchText, name: str) -> int:
    found = number_of(text, None, name)
    if found is None:
        message = f"has no --{name}, so the model is not known; give --set {name}=N or --model FILE"
        raise InputError(fault_of(None, text, message))
    return found


def _vocabulary(text: LaunchText) -> int:
    """--vocab-size, or the size of GPT-2's vocabulary, whose files Megatron-LM's examples name."""
    size = number_of(text, None, "vocab-size")
    if size is not None:
        return size
    named = {setting.flag for setting in (*text.settings, *text.unread)}
    kind = word_of(text, "GPT2BPETokenizer", "tokenizer-type")
    if {"vocab-file", "merge-file"} & named and kind == "GPT2BPETokenizer":
        return GPT2_VOCABULARY
    message = (
        "has no --vocab-size, and its tokenizer is not read; give --set vocab-size=N or --model "
        "FILE"
    )
    raise InputError(fault_of(flag(text, "tokenizer-type"), text, message))


def _positions(text: LaunchText) -> str:
    return word_of(text, "learned_absolute", "position-embedding-type")


def _rotary(text: LaunchText) -> bool:
    # arguments.py turns the old flag into the type.
    return is_set(text, "use-rotary-position-embeddings") or _positions(text) in ("rope", "mrope")


def _attention(text: LaunchText, hidden: int) -> Attention | LatentAttention:
    heads = _needed(text, "num-attention-heads")
    if is_set(text, "multi-latent-attention"):
        return LatentAttention(
            num_heads=heads,
            query_rank=number_of(text, None, "q-lora-rank"),
            kv_rank=count_of(text, 512, "kv-lora-rank"),
            nope_head_dim=count_of(text, 128, "qk-head-dim"),
            rope_head_dim=count_of(text, 64, "qk-pos-emb-head-dim"),
            value_head_dim=count_of(text, 128, "v-head-dim"),
        )
    if hidden % heads and flag(text, "kv-channels") is None:
        message = f"{heads} does not divide hidden size {hidden}"
        raise InputError(fault_of(flag(text, "num-attention-heads"), text, message))
    # FlagScale's files give the groups alone, which Megatron-LM reads with the switch only.
    grouped = is_set(text, "group-query-attention") or text.trainer == "flagscale"
    biases = not is_set(text, "disable-bias-linear")
    return Attention(
        num_heads=heads,
        num_kv_heads=count_of(text, heads, "num-query-groups") if grouped else heads,
        head_dim=count_of(text, max(1, hidden // heads), "kv-channels"),
        qkv_bias=biases or is_set(text, "add-qkv-bias"),
        output_bias=biases,
        qk_norm=is_set(text, "qk-layernorm"),
        rotary=_rotary(text),
    )


def _dense(text: LaunchText, hidden: int) -> Mlp:
    gated = is_set(text, "swiglu")
    # arguments.py: two thirds of it for three matrices, as a multiple of 64.
    width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    return Mlp(
        ffn_hidden_size=count_of(text, max(1, width), "ffn-hidden-size"),
        gated=gated,
        bias=not is_set(text, "disable-bias-linear"),
    )


def _experts(text: LaunchText, dense: Mlp) -> Experts | None:
    count = number_of(text, None, "num-experts")
    if count is None:
        return None
    return Experts(
        num_experts=count,
        experts_per_token=count_of(text, 2, "moe-router-topk"),
        expert_ffn_hidden_size=count_of(text, dense.ffn_hidden_size, "moe-ffn-hidden-size"),
        shared_ffn_hidden_size=number_of(text, 0, "moe-shared-expert-intermediate-size", least=0)
        or 0,
        shared_gate=is_set(text, "moe-shared-expert-gate"),
        gated=dense.gated,
        bias=dense.bias,
    )


def _pattern(text: LaunchText, name: str, layers: int) -> list[bool]:
    """Ones of a pattern: N for every N-th from the first on, or `([0]*3+[1]*58)`."""
    setting = flag(text, name)
    if setting is None:
        return [True] * layers
    written = "".join(setting.values).replace(" ", "")
    if written.isascii() and written.isdecimal() and int(written[:9]) > 0:
        return [at % int(written[:9]) == 0 for at in range(layers)]
    found = _written_out(setting, written)
    if len(found) != layers:
        message = f"has {len(found)} layers; --num-layers is {layers}"
        raise InputError(fault_of(setting, text, message))
    return found


def _written_out(setting: Setting, written: str) -> list[bool]:
    """A sum of lists, each perhaps repeated, perhaps in brackets that are repeated as a whole."""
    whole = re.fullmatch(r"\((.*)\)(?:\*(\d{1,6}))?", written)
    inner, times = (whole.group(1), int(whole.group(2) or 1)) if whole else (written, 1)
    found: list[bool] = []
    for term in inner.split("+"):
        read = _TERM.fullmatch(term)
        if read is None:
            raise InputError(wrong(setting, "a number, or a pattern as in ([0]*3+[1]*58)"))
        each = [digit == "1" for digit in read.group(1) if digit in "01"]
        repeats = int(read.group(2) or 1)
        if (len(found) + len(each) * repeats) * times > MAX_LAYERS:
            raise InputError(wrong(setting, f"a pattern of at most {MAX_LAYERS:,} layers"))
        found += each * repeats
    return found * times


def _windows(text: LaunchText, rows: list[TransformerLayer]) -> list[TransformerLayer]:
    """--window-size LEFT,0: a token sees LEFT before itself; with a pattern some layers have it."""
    setting = flag(text, "window-size")
    if setting is None:
        return rows
    read = _WINDOW.fullmatch(",".join(setting.values))
    if read is None:
        raise InputError(wrong(setting, "a window as in 127,0"))
    skip = flag(text, "window-attn-skip-freq")
    has = [True] * len(rows)
    if skip is not None:
        written = "".join(skip.values)
        if written.isascii() and written.isdecimal() and int(written[:9]) > 0:
            # transformer/utils.py, is_layer_window_attention: every N-th layer sees everything.
            has = [(at + 1) % int(written[:9]) != 0 for at in range(len(rows))]
        else:
            has = _pattern(text, "window-attn-skip-freq", len(rows))
    window = int(read.group(1)) + 1
    found = []
    for layer, each in zip(rows, has, strict=True):
        attention = layer.attention
        if each and isinstance(attention, Attention):
            layer = replace(layer, attention=replace(attention, window=window))
        found.append(layer)
    return found


# ---- beyond shapes

_LLAMA3_FACTOR = 8.0
"""--rope-scaling-factor where it is left out."""


def _with_numerics(model: ModelSpec, text: LaunchText, *, rotary: bool) -> ModelSpec:
    """The model with everything of this kind that the launch says."""
    fraction = _given_number(text, "rotary-percent")
    experts = any(isinstance(run.layer.mlp, Experts) for run in model.layer_runs)
    return replace(
        model,
        norm_epsilon=_given_number(text, "norm-epsilon", "layernorm-epsilon"),
        activation=_activation(text),
        rotary_base=_given_number(text, "rotary-base") if rotary else None,
        rotary_fraction=fraction if rotary and fraction != 1.0 else None,
        rotary_scaling=_scaling(text) if rotary else None,
        router=_router(text) if experts else None,
    )


def _given_number(text: LaunchText, *names: str) -> float | None:
    return None if flag(text, *names) is None else fraction_of(text, 0.0, *names)


def _activation(text: LaunchText) -> Activation | None:
    if is_set(text, "swiglu"):
        return Activation.SILU
    if is_set(text, "openai-gelu"):
        return Activation.GELU_TANH
    if is_set(text, "squared-relu", "quick-geglu"):
        return Activation.OTHER
    # transformer/mlp.py: the fusion is the tanh form.
    return Activation.GELU if is_set(text, "no-bias-gelu-fusion") else None


def _scaling(text: LaunchText) -> RotaryScaling | None:
    if is_set(text, "use-rope-scaling"):
        return RotaryScaling(
            kind=RotaryScalingKind.LLAMA3,
            factor=fraction_of(text, _LLAMA3_FACTOR, "rope-scaling-factor"),
            original_length=8192,
            low_frequency_factor=1.0,
            high_frequency_factor=4.0,
        )
    latent = is_set(text, "multi-latent-attention")
    # MLATransformerConfig: yarn unless --rope-type says rope.
    if latent and word_of(text, "yarn", "rope-type") == "yarn":
        factor = _given_number(text, "rotary-scaling-factor")
        if factor is not None:
            return RotaryScaling(
                kind=RotaryScalingKind.YARN,
                factor=factor,
                # Constants of MLATransformerConfig, and defaults of arguments.py.
                original_length=4096,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=fraction_of(text, 1.0, "mscale"),
                mscale_all_dim=fraction_of(text, 0.0, "mscale-all-dim"),
            )
    stretched = number_of(text, None, "rotary-seq-len-interpolation-factor")
    if stretched is not None and not latent:
        return RotaryScaling(kind=RotaryScalingKind.LINEAR, factor=float(stretched))
    return None


def _router(text: LaunchText) -> Router | None:
    """None where no flag speaks of it."""
    score = word_of(text, "", "moe-router-score-function")
    known = score in tuple(ScoreFunction)
    balancing = flag(text, "moe-router-load-balancing-type")
    kinds = () if balancing is None else balancing.values
    groups = number_of(text, None, "moe-router-num-groups")
    per_token = number_of(text, None, "moe-router-group-topk")
    router = Router(
        score_function=ScoreFunction(score) if known else None,
        # A softmax before the choice is one over all experts, which the chosen do not add up to.
        normalized=False if is_set(text, "moe-router-pre-softmax") and score != "sigmoid" else None,
        scaling_factor=_given_number(text, "moe-router-topk-scaling-factor"),
        num_groups=groups if per_token is not None else None,
        groups_per_token=per_token if groups is not None else None,
        correction_bias=is_set(text, "moe-router-enable-expert-bias") or None,
        loss_coefficient=_given_number(text, "moe-aux-loss-coeff"),
        loss_per_sequence=True if "seq_aux_loss" in kinds else None,
    )
    return router if router != Router() else None
