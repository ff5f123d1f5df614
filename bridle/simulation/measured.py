"""What a step costs where it was measured: the default of simulations."""

from __future__ import annotations

from bridle.simulation.cost import StepCost

#: `bridle bench steps --model-size 20m` on two cores of an x86 server: a Llama of 20 million parameters in float32.
MEASURED = StepCost(base=0.010, row=2e-4, token=1e-4, context=1e-7)
