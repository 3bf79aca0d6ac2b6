# An image with everything the project needs, for GPUs or for a CPU:
#   docker build -t verl-memopt .                                  # for GPUs (CUDA 13; the host needs driver 580 or newer)
#   docker build -t verl-memopt --build-arg BUILD=cpu .            # for a CPU
#   docker run --rm -it --init --gpus all --shm-size 8g -v "$PWD/runs:/verl_memopt/runs" verl-memopt \
#       bash examples/memory_optimization/run_rloo_single_gpu.sh
# On a CPU leave out --gpus all. Ray keeps batches in shared memory, of which Docker gives 64 MB unless --shm-size asks for more.
# The full image of Python has a C compiler and Python.h, without which vLLM does not start on a GPU.
FROM python:3.11-bookworm
ARG BUILD=gpu
WORKDIR /verl_memopt
# The packages alone first: a change of the code then keeps their layer. setup.py asks for the version and the readme.
COPY setup.py setup_env.sh requirements.txt README.md ./
COPY requirements requirements
COPY verl_memopt/__init__.py verl_memopt/__init__.py
RUN VERL_MEMOPT_BUILD=$BUILD ./setup_env.sh
COPY . .
ENV PATH=/verl_memopt/.venv/bin:$PATH
CMD ["verl-memopt", "--help"]
