# `make train` and `make test` are all one needs; both set .venv up first, and again when setup.py has changed.

VERSIONS = 3.13 3.12 3.11 3.10
COMPAT_VERSIONS = 3.12 3.11 3.10
# The oldest Keras and TensorFlow that tfdist supports.
COMPAT = 'keras==3.10.0' 'tensorflow==2.19.*'

BIN = .venv/bin
PIP_INSTALL = -m pip install -qq --disable-pip-version-check
PYTEST = -m pytest -q
# For models as small as those of the tests, making the kernels of oneDNN takes a quarter of the CPU time.
WITHOUT_ONEDNN = TF_ENABLE_ONEDNN_OPTS=0
# Several files of tests at a time: on two cores, some of them wait for processes.
FILES = --dist loadfile --max-worker-restart 0
SCALED = one_device,mirrored,central_storage,multi_worker_mirrored

.PHONY: help train test test-quick test-compat test-engines test-ecosystem chaos soak lint bench notebooks docs dist-check test-matrix clean
.DELETE_ON_ERROR:

help:
	@echo "make train        train a small network on two local workers"
	@echo "make test         lint, types, doctests and all tests"
	@echo "make test-quick   lint, types, doctests and unit tests"
	@echo "make test-compat  the Keras hooks and parity on the oldest Keras supported"
	@echo "make test-matrix  the same on each TensorFlow and Keras that can be installed; writes the table of docs/versions.md"
	@echo "make test-engines the tests on real engines: Slurm, ssh, Open MPI, Ray, Kubernetes"
	@echo "make test-ecosystem  models of KerasHub, Keras Applications and Keras Recommenders beside Keras without tfdist, KerasTuner; writes the table of docs/ecosystem.md"
	@echo "make lint         lint and types"
	@echo "make notebooks    execute the notebooks and save their outputs; on a machine that does nothing else"
	@echo "make docs         the documentation as a site in build/site, with warnings as errors; needs no network"
	@echo "make soak         twenty minutes with thirty kills: goodput, and threads, files and memory stay flat"
	@echo "make bench        measure what fit, one device, XLA, policies, shards, embeddings, stages, parameter servers, failures, snapshots, step breakdown, input, images, the largest batch, many tasks and growing memory cost, write benchmarks/reports"
	@echo "make chaos        kill trainings some ninety times, at random moments"
	@echo "make dist-check   build wheel and sdist, install each in a new environment, and use it"
	@echo "make clean        remove what these made, but for runs/"
	@echo "PYTHON=/path/to/python3 chooses the Python of a new environment."

train: .venv/installed-plot
	$(BIN)/tfdist launch --workers 2 -- tfdist train --config=configs/digits.py

lint: .venv/installed-test
	$(BIN)/ruff format -q --check .
	$(BIN)/ruff check -q .
	$(BIN)/mypy

test-quick: .venv/installed-test lint
	$(BIN)/python $(PYTEST) --doctest-modules tfdist
	$(WITHOUT_ONEDNN) $(BIN)/python $(PYTEST) -n 4 $(FILES) tests/test_*.py tests/unit

test: test-quick
	$(BIN)/python $(PYTEST) -n 3 $(FILES) tests/cluster
	$(WITHOUT_ONEDNN) $(BIN)/python $(PYTEST) -n 4 $(FILES) tests/parity tests/gpu tests/engines/test_slurm_steps.py

# apt-get install slurm-wlm munge openssh-server openmpi-bin etcd-server for all of them; what is missing is skipped.
# docs/kubernetes.md says where the servers of Kubernetes come from.
test-engines: .venv/installed-engines
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python $(PYTEST) tests/engines

test-ecosystem: .venv/installed-ecosystem
	$(BIN)/python .ci/test_ecosystem.py

chaos: .venv/installed-test
	TFDIST_CHAOS_ROUNDS=4 $(BIN)/python $(PYTEST) tests/cluster/test_faults.py tests/cluster/test_memory_snapshots.py

soak: .venv/installed-test
	$(BIN)/python benchmarks/soak.py

test-compat: .venv-compat/installed
	.venv-compat/bin/python $(PYTEST) tests/unit/keras_compat
	.venv-compat/bin/python $(PYTEST) tests/parity -k mirrored-2

# COMBINATIONS="2.19:3.10 2.21:3.15" runs these only.
test-matrix: | .venv/bin/python
	$(BIN)/python .ci/test_matrix.py $(COMBINATIONS)

bench: .venv/installed-bench
	$(BIN)/python benchmarks/fit_overhead.py; fit=$$?; $(BIN)/python benchmarks/parameter_server.py; servers=$$?; \
	  $(BIN)/python benchmarks/recovery.py; recovery=$$?; $(BIN)/python benchmarks/snapshots.py; snapshots=$$?; $(BIN)/python benchmarks/survivors.py; survivors=$$?; $(BIN)/python benchmarks/step_breakdown.py; step_breakdown=$$?; \
	  $(BIN)/python benchmarks/pipeline_parallel.py; pipeline_parallel=$$?; $(BIN)/python benchmarks/sync.py; sync=$$?; $(BIN)/python benchmarks/updates.py; updates=$$?; $(BIN)/python benchmarks/xla.py; xla=$$?; $(BIN)/python benchmarks/sharding.py; sharding=$$?; $(BIN)/python benchmarks/allreduce.py; allreduce=$$?; $(BIN)/python benchmarks/allreduce.py --hosts; hosts=$$?; \
	  $(BIN)/tfdist bench --config=configs/digits.py --workers 1,2 --strategies $(SCALED) --rounds 3 --steps 100 --out runs/scaling \
	    && cp runs/scaling/bench.md benchmarks/reports/scaling.md && cp runs/scaling/bench.json benchmarks/reports/scaling.json; scaling=$$?; \
	  $(BIN)/python benchmarks/one_device.py; one_device=$$?; $(BIN)/python benchmarks/scale.py; scale=$$?; $(BIN)/python benchmarks/engines.py; engines=$$?; \
	  $(BIN)/python benchmarks/imagenet.py; imagenet=$$?; $(BIN)/python benchmarks/embedding.py; embedding=$$?; $(BIN)/python benchmarks/largest_batch.py; largest_batch=$$?; $(BIN)/python benchmarks/memory_growth.py; growth=$$?; \
	  $(BIN)/python benchmarks/input.py && exit $$((hosts | growth | embedding | largest_batch | imagenet | one_device | scale | allreduce | engines | pipeline_parallel | sync | updates | xla | sharding | fit | servers | recovery | snapshots | survivors | step_breakdown | scaling))

notebooks: .venv/installed-notebooks
	$(BIN)/python notebooks/execute.py

docs: .venv/installed-docs
	$(BIN)/python -m mkdocs build --strict

dist-check: | .venv/bin/python
	$(BIN)/python .ci/dist_check.py

clean:
	rm -rf .venv .venv-compat .venv-matrix build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One stamp for each of setup.py's extras.
.venv/installed-%: setup.py $(wildcard tfdist/parallel/collectives/native/*.cc tfdist/parallel/collectives/native/*.h) | .venv/bin/python
	@echo "Installing tfdist[$*] into .venv; the first time this takes some minutes: TensorFlow is large."
	@$(BIN)/python $(PIP_INSTALL) --editable '.[$*]'
	@touch $@

.venv-compat/installed: setup.py | .venv-compat/bin/python
	@echo "Installing tfdist[test] with $(COMPAT) into .venv-compat; the first time this takes some minutes."
	@.venv-compat/bin/python $(PIP_INSTALL) --editable '.[test]' $(COMPAT)
	@touch $@

.venv/bin/python:
	$(call new-environment,.venv,$(VERSIONS))

.venv-compat/bin/python:
	$(call new-environment,.venv-compat,$(COMPAT_VERSIONS))

# $(call new-environment,DIRECTORY,VERSIONS): with the first Python that is one of the versions, and can make environments.
define new-environment
	@for python in $(or $(PYTHON),$(addprefix python,$(2)) python3 python); do \
	  if $$python -c 'import ensurepip, sys; sys.exit("%d.%d" % sys.version_info[:2] not in "$(2)".split())' 2>/dev/null; then \
	    echo "Making $(1) with $$($$python --version)."; exec $$python -m venv --clear $(1); \
	  fi; \
	done; \
	echo "make: expected Python $(2) with its venv module, found none of it as $(or $(PYTHON),python3.x in PATH)." >&2; \
	echo "Install one (on Debian and Ubuntu with its python3.x-venv package), or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	exit 1
endef
