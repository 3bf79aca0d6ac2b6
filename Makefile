# make train   set up and train the tiny model on the toy task (on a GPU that reaches the hub: a real model)
# make test    set up, lint, check types, run the tests
# make quick   set up, lint what changed since the main branch and run its unit tests (about a minute)
# make proofs  the slow proofs (kill -9, many seeds)
# make long-run  2,000 steps left alone and 2,000 with 50 faults, which must learn the same (an hour or two); the report is in build/
# make gpu-tests  what only a GPU can show (skipped without one; VERL_MEMOPT_GPU_TESTS_ON=cpu rehearses it on a CPU)
# make mutants  plant faults in the code that must never be wrong, one at a time, and count those that a test finds (an hour or two)
# make docs    the generated pages (settings, knobs, models, TRL's names), the tables of cards, and the site
# ARGS are passed on: make train ARGS="trainer.total_training_steps=20"
.PHONY: setup train test quick long-run gpu-tests lint types proofs mutants docs clean
.DEFAULT_GOAL := help
ARGS ?=
# Bytecode is kept, because the tests start the interpreter a hundred times.
RUN = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest

help:
	@sed -n 's/^# //p' Makefile

setup:
	@./setup_env.sh

train: setup
	bash examples/memory_optimization/run_rloo_single_gpu.sh $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports --no-cache

types: setup
	.venv/bin/mypy

# Tests that wait for a run leave cores idle, so mypy runs beside them. Two test processes keep two cores busy, and three are no
# faster, because most tests start processes of their own.
test: lint
	@mkdir -p build; .venv/bin/mypy > build/mypy.txt 2>&1 & types=$$!; \
	$(RUN) -n 2 --dist loadfile --no-loadscope-reorder $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat build/mypy.txt; exit $$((tests ? tests : types))

quick: setup
	@OMP_NUM_THREADS=1 .venv/bin/python tests/quick.py $(ARGS)

proofs: setup
	$(RUN) -m slow $(ARGS)

long-run: setup
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.faults.long_run build/long_run $(ARGS)

gpu-tests: setup
	$(RUN) -m gpu $(ARGS)

mutants: setup
	@tests/mutants/setup.sh
	OMP_NUM_THREADS=1 .venv-mutants/bin/python tests/mutants/run.py run $(foreach name,$(ARGS),'$(name)')
	@.venv-mutants/bin/python tests/mutants/table.py

docs: setup
	.venv/bin/python -m tools.settings_page > docs/configuration.md
	.venv/bin/python -m tools.trl_page > docs/from_trl.md
	.venv/bin/python -m tools.knobs_page > docs/memory.md
	.venv/bin/python -m tools.models_page > docs/models.md
	.venv/bin/python -m tools.cards
	@if [ -x .venv/bin/mkdocs ]; then NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict && echo "the site: build/docs/index.html"; \
	else echo "For the site as well: .venv/bin/pip install -e '.[docs]', then make docs again"; fi

clean:
	rm -rf .venv .venv-peers .venv-mutants mutants runs checkpoints outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
