"""The plan: what a training takes before there is a cluster. Works without torch, and knows no simulator.

    from greylag.plan import demand, find_model, known_models, stated_utilization, training

    gpt_4 = training(find_model("gpt-4", known_models()))
    print(demand(gpt_4, [1024, 10_000], 989.5e12, stated_utilization([0.3985, 0.307])).days.value)  # 602 and 80

`demand` (compute, days, energy, money), `known` and `trend` (models that were trained) are described in their modules,
as are the scaling law (`law`) and what failures cost (`goodput`).
"""

from greylag.plan.demand import approximate_training, count_training, demand, stated_training, stated_utilization
from greylag.plan.known import find_model, known_models, training
from greylag.plan.trend import fit_trend

__all__ = [
    "approximate_training",
    "count_training",
    "demand",
    "find_model",
    "fit_trend",
    "known_models",
    "stated_training",
    "stated_utilization",
    "training",
]
