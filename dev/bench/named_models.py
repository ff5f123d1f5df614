"""The open models of 2025 and 2026 by name: the architecture of each in transformers and in GGUF files. Whether a model
is served follows from the survey of architectures and from the table of GGUF families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bridle.gguf.families import known_architectures

CAUSAL, SEEING = "/causal", "/multimodal"
SERVED = "served"
_BEGIN, _END = "<!-- models by name -->", "<!-- end of models by name -->"
_INDEX = "sparse attention with an index"


class NamedModel(NamedTuple):
    """`trials` are names of architectures in the survey; `gguf` is llama.cpp's architectures for the model, if it has
    any. `cause` is the reason why the model's folder is refused, if the survey cannot find the reason."""

    name: str
    trials: tuple[str, ...]
    gguf: tuple[str, ...]
    cause: str = ""


def _one(name: str, family: str, gguf: str = "", kind: str = CAUSAL, cause: str = "") -> NamedModel:
    return NamedModel(name, (family + kind,) if family else (), tuple(gguf.split()), cause)


NAMED_MODELS = (
    _one("Qwen3 0.6B to 32B", "qwen3", "qwen3"),
    _one("Qwen3 30B-A3B, 235B-A22B", "qwen3_moe", "qwen3moe"),
    _one("Qwen3-Coder 30B, 480B", "qwen3_moe", "qwen3moe"),
    _one("Qwen3-Next, Qwen3-Coder-Next", "qwen3_next", "qwen3next"),
    _one("Qwen3.5, Qwen3.6 dense", "qwen3_5", "qwen35", SEEING),
    _one("Qwen3.5, Qwen3.6 with experts", "qwen3_5_moe", "qwen35moe", SEEING),
    _one("Qwen4-Exp", "qwen4_exp", "qwen4exp", SEEING),
    _one("Qwen3-VL", "qwen3_vl", "qwen3vl", SEEING),
    _one("Llama 3", "llama", "llama"),
    _one("Llama 4", "llama4", "llama4", SEEING),
    _one("Gemma 3", "gemma3", "gemma3", SEEING),
    _one("Gemma 3n", "gemma3n_text", "gemma3n"),
    _one("Gemma 4", "gemma4", "gemma4", SEEING),
    _one("gpt-oss 20B, 120B", "gpt_oss", "gpt-oss"),
    _one("GLM-4.5, 4.6, 4.7", "glm4_moe", "glm4moe"),
    _one("GLM-4.7-Flash", "glm4_moe_lite", "deepseek2"),
    _one("GLM-5", "glm_moe_dsa", "glm-dsa"),
    _one("GLM-5.3-Flash", "glm5_next", "glm5-next", SEEING),
    _one("DeepSeek V3, R1, V3.1", "deepseek_v3", "deepseek2"),
    _one("DeepSeek V3.2", "deepseek_v32", "deepseek32"),
    _one("DeepSeek V4", "deepseek_v4", "deepseek4"),
    _one("Kimi K2, K2-Thinking", "deepseek_v3", "deepseek2"),
    _one("Kimi K2.5, K2.6", "kimi_k25", "deepseek2", SEEING),
    _one("Kimi K3", "", "kimi-k3", cause="needs Python code from the checkpoint"),
    _one("Kimi Linear", "kimi_linear", "kimi-linear"),
    _one("MiniMax M2, M2.5", "minimax_m2", "minimax-m2"),
    _one("MiniMax M3", "minimax_m3_vl", "minimax-m3", SEEING, _INDEX),
    _one("Mistral Small 3, Magistral", "mistral3", "llama", SEEING),
    _one("Ministral 3, Devstral 2", "ministral3", "mistral3"),
    _one("Mistral Small 4", "mistral4", "mistral4", SEEING),
    _one("Mistral Large 4", "mistral_large4", "", SEEING),
    _one("Phi-4, Phi-4-mini", "phi3", "phi3"),
    _one("Granite 4 dense", "granite", "granite"),
    _one("Granite 4 H", "granitemoehybrid", "granitehybrid"),
    _one("Nemotron 3 Nano, Super", "nemotron_h", "nemotron_h_moe"),
    _one("LFM2, LFM2.5", "lfm2", "lfm2"),
    _one("LFM2-8B-A1B", "lfm2_moe", "lfm2moe"),
    _one("LFM3", "lfm3"),
    _one("SmolLM3", "smollm3", "smollm3"),
    _one("OLMo 3", "olmo3", "olmo2"),
    _one("OLMo Hybrid", "olmo_hybrid"),
    _one("EXAONE 4", "exaone4", "exaone4"),
    _one("K-EXAONE 236B", "exaone_moe", "exaone-moe"),
    NamedModel(
        "Hunyuan dense, A13B",
        ("hunyuan_v1_dense" + CAUSAL, "hunyuan_v1_moe" + CAUSAL),
        ("hunyuan-dense", "hunyuan-moe"),
    ),
    _one("Hy3", "hy_v3", "hy_v3"),
    _one("Hy4", "hy_v4", "hy_v4"),
    NamedModel("ERNIE 4.5", ("ernie4_5" + CAUSAL, "ernie4_5_moe" + CAUSAL), ("ernie4_5", "ernie4_5-moe")),
    _one("Seed-OSS 36B", "seed_oss", "seed_oss"),
    _one("Falcon-H1", "falcon_h1", "falcon-h1"),
    _one("Jamba", "jamba", "jamba"),
    _one("MiMo-V2-Flash", "mimo_v2_flash", "mimo2"),
    _one("Apertus", "apertus", "apertus"),
    _one("Command A", "cohere2", "cohere2"),
    _one("Command A+", "cohere2_moe", "cohere2moe"),
    _one("Step 3.5, 3.7 Flash", "step3p7", "step35", SEEING),
    _one("Solar Open 100B", "solar_open", "glm4moe"),
    _one("Ling 3, Ring 3 Flash", "bailing_hybrid", "bailingmoe3"),
    _one("Trinity", "afmoe", "afmoe"),
    _one("Laguna", "laguna", "laguna"),
    _one("LongCat Flash", "longcat_flash"),
    _one("Muse Glimmer 30B", "muse_glimmer", "muse-glimmer", SEEING),
    _one("Inkling", "inkling_mm_model", "", SEEING, "unsupported kinds of layers"),
)


def states_of(page: str) -> dict[str, str]:
    """Return the result of each architecture in the survey's table on `page`, by the architecture's name."""
    found: dict[str, str] = {}
    for line in page.partition("<!-- families -->")[2].partition("<!-- end of families -->")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for family in cells[2].replace("`", "").split(", ") if len(cells) == 3 else ():
            found[family.rstrip("*") + (SEEING if family.endswith("*") else CAUSAL)] = cells[0]
    return found


def named_rows(states: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return a row for each model: its architectures, and for its folder and its GGUF file whether bridle serves it, or
    why not."""
    known = set(known_architectures())
    return [
        (
            model.name,
            ", ".join(f"`{trial.partition('/')[0]}`" for trial in model.trials) or "-",
            _folder(model, states),
            _file(model, known),
        )
        for model in NAMED_MODELS
    ]


def _folder(model: NamedModel, states: Mapping[str, str]) -> str:
    if model.cause:
        return f"no: {model.cause}"
    bad = [state for trial in model.trials if (state := states.get(trial, "untried")) != SERVED]
    return f"no: {bad[0].removeprefix('refused: ')}" if bad else "yes"


def _file(model: NamedModel, known: set[str]) -> str:
    if not model.gguf:
        return "no: llama.cpp lacks it"
    missing = [arch for arch in model.gguf if arch not in known]
    return f"no: bridle does not read `{missing[0]}`" if missing else ", ".join(f"`{arch}`" for arch in model.gguf)


def named_table(states: Mapping[str, str]) -> str:
    """Return the table of models in Markdown, with the numbers of served models."""
    rows = named_rows(states)
    folders = sum(not folder.startswith("no") for _, _, folder, _ in rows)
    files = sum(not file.startswith("no") for *_, file in rows)
    lines = [
        f"Of {len(rows)} models {folders} are served from a folder and {files} from a GGUF file.",
        "",
        "| Model | Architecture | Folder | GGUF |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write_named_table(page: Path) -> None:
    """Replace the table of models by name on a page, using the survey's table on the same page."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    page.write_text(f"{before}{_BEGIN}\n\n{named_table(states_of(text))}\n\n{_END}{after}", encoding="utf-8")


def main() -> None:
    write_named_table(Path("docs/models.md"))


if __name__ == "__main__":
    main()
