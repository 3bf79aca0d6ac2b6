# Sourced: goes to the root of the repository, chooses PYTHON, and says what a command ran on.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

# machine PYTHON COMMAND...: date, commit, command, versions and device, a line each. COMMIT names the commit where there is no git.
machine() {
    local python=$1
    shift
    date -u +"%Y-%m-%d %H:%M UTC"
    git rev-parse HEAD 2>/dev/null || echo "${COMMIT:-commit unknown}"
    printf '%q ' "$@"; echo
    "$python" -c 'import platform, torch, transformers; print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)'
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null || echo "no GPU: CPU, $(nproc) cores"
}

# device_slug: the GPU's name as part of a folder's name, or cpu.
device_slug() {
    local name
    name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || true
    echo "${name:-cpu}" | tr '[:upper:]' '[:lower:]' | sed -E 's/^nvidia //; s/[^a-z0-9]+/-/g; s/^-+|-+$//g'
}

# evidence PART: makes OUT, the folder of a part's evidence.
evidence() {
    OUT=${OUT:-docs/evidence/$(date +%Y-%m-%d)-$1-$(device_slug)}
    mkdir -p "$OUT"
}
