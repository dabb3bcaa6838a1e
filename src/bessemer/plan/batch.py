"""Batch size and learning rate by the published laws, side by side.

The laws disagree by far more than their authors' error bars, since each holds for one optimizer, schedule, tokenizer and data
set. Read a plan with their spread, and let a sweep around it decide.

N: parameters without embeddings; D: tokens; C = 6 N D FLOPs. Batches are in tokens. Sources: Bi et al. 2024 (DeepSeek LLM,
section 3.1), Li et al. 2025 (Step Law), Liu et al. 2025 (Moonlight, appendix B), Bergsma et al. 2025 (Power Lines, figure 1),
Kaplan et al. 2020 (section 5.1), Zhang et al. 2024 (section 3.3).
"""

from __future__ import annotations

from bessemer.model import scaling_rules
from bessemer.model.scaling_rules import kaplan_critical_batch, kaplan_loss


def optimal_batches(parameters: float, tokens: float) -> dict[str, float]:
    """Return the batch with the lowest loss by each law."""
    flops = 6.0 * parameters * tokens
    return {
        "deepseek": scaling_rules.batch_tokens(flops),
        "steplaw": 0.58 * tokens**0.571,
        "moonlight": 0.0065 * flops**0.4138,
        "power_lines": 0.0306 * tokens**0.383 * 2048,
    }


def critical_batches(parameters: float, tokens: float) -> dict[str, float]:
    """Return the batch beyond which more data parallelism stops paying, by each law: where twice the fewest tokens are needed
    (Kaplan, Power Lines), or a fifth more steps than in proportion (Zhang)."""
    # Zhang's law in millions of tokens: only so does it meet the paper's two other fits, 93.20 N^0.47 along 20 tokens a
    # parameter (22.91 20^0.47 = 93.7) and 621.341 N^0.087 at 3.072B tokens (N in millions). Power Lines: of the fewest tokens
    # that reach the loss; the planned ones stand for them, which are close to it well under the critical batch.
    return {
        "kaplan": kaplan_critical_batch(kaplan_loss(parameters, tokens)),
        "zhang": 22.91 * (tokens / 1e6) ** 0.47 * 512,
        "power_lines": 0.0471 * tokens**0.462 * 2048,
    }


def learning_rates(parameters: float, tokens: float) -> dict[str, float]:
    """Return the peak learning rate at each law's own batch."""
    flops = 6.0 * parameters * tokens
    return {
        "deepseek": scaling_rules.learning_rate(flops),
        "steplaw": 1.79 * parameters**-0.713 * tokens**0.307,
        "moonlight": 0.0127 * flops**-0.057,
    }
