# Sourced: says what a command ran on.

# machine PYTHON COMMAND...: date, commit, command, versions and device, a line each.
machine() {
    local python=$1
    shift
    date -u +"%Y-%m-%d %H:%M UTC"
    git rev-parse HEAD 2>/dev/null || true
    printf '%q ' "$@"; echo
    "$python" -c 'import platform, torch, transformers; print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)'
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU: CPU, $(nproc) cores"
}
