"""Train a posterior with BayesFlow, whose train_step makes its metrics in the first step.

Nothing is standardized: that uses moments of the batches a replica has seen.
"""

import bayesflow
import numpy as np

rng = np.random.default_rng(0)


def prior():
    return {"theta": rng.normal(size=3)}


def likelihood(theta):
    return {"x": theta + 0.1 * rng.normal(size=(10, 3))}


simulator = bayesflow.make_simulator([prior, likelihood])
workflow = bayesflow.BasicWorkflow(
    simulator=simulator,
    inference_network=bayesflow.networks.CouplingFlow(depth=2, subnet_kwargs={"dropout": 0.0}),
    summary_network=bayesflow.networks.DeepSet(summary_dim=6, dropout=0.0),
    inference_variables=["theta"],
    summary_variables=["x"],
    standardize=None,
)
data, validation = simulator.sample(256), simulator.sample(64)
workflow.fit_offline(data, epochs=3, batch_size=32, validation_data=validation, verbose=0)
samples = workflow.sample(conditions={"x": validation["x"][:4]}, num_samples=20)
assert np.isfinite(samples["theta"]).all()
workflow.fit_online(epochs=1, num_batches_per_epoch=4, batch_size=16, verbose=0)
