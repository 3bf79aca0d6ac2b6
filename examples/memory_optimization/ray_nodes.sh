# Sourced by run_multi_node.sh. It starts Ray on each of NODES (default: the nodes of the Slurm job), waits until all have joined, and sets
# RAY_ADDRESS and NNODES. The first node is Ray's head. Ray ends with this shell. For a node named localhost, Ray starts on this machine.
read -ra nodes <<<"${NODES:-$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | tr '\n' ' ' || true)}"
if [ ${#nodes[@]} -eq 0 ]; then
    echo "run_multi_node.sh: no nodes. Run it in a Slurm job, or set NODES=\"host1 host2\", or RAY_ADDRESS and NNODES." >&2
    exit 2
fi

# Start Ray on a node and stay until this shell ends, which ends Ray there.
start_ray() {
    local node=$1
    shift
    if [ "$node" = localhost ]; then
        exec "$RAY" start --block "$@"
    elif [ -n "${SLURM_JOB_ID:-}" ]; then
        exec srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" "$RAY" start --block "$@"
    fi
    { set +x; } 2>/dev/null
    # The token goes through ssh's standard input, because a command line is visible in the list of processes. The input ends with this
    # shell, and then Ray is stopped.
    { printf '%s\n' "$RAY_AUTH_TOKEN" && tail --pid=$$ -f /dev/null; } | ssh "$node" "
        read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
        cd $(printf %q "$PWD") && { $(printf '%q ' "$RAY" start --block "$@") & } && ray=\$! && cat >/dev/null; kill \$ray"
}

head_host=${nodes[0]}
# The address at which other nodes reach this machine. Its own name may lead to a loopback address (127.0.1.1).
[ "$head_host" != localhost ] || head_host=$("$PYTHON" -c "
import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 9))
print(probe.getsockname()[0])
" "${nodes[1]:-localhost}")
# When Ray is stopped, the run is over. Without the last variable, a node would wait 30 seconds for a head that has ended too.
export RAY_ADDRESS=$head_host:$RAY_PORT RAY_USAGE_STATS_ENABLED=0 RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
# Only processes with the token can use these nodes. The trace of `bash -x` must not show the token.
{ case $- in *x*) trace=-x ;; *) trace=+x ;; esac; set +x; } 2>/dev/null
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
set $trace
NNODES=${#nodes[@]}
started=()
# On this machine, the processes of each node form their own process group, which is ended as a whole.
stop_ray() { for group in "${started[@]}"; do kill -- "-$group" 2>/dev/null || true; done; }
trap stop_ray EXIT

for node in "${nodes[@]}"; do
    if [ ${#started[@]} -eq 0 ]; then
        place=(--head --node-ip-address="$head_host" --port="$RAY_PORT" --include-dashboard=false)
    else
        place=(--address="$RAY_ADDRESS")
    fi
    set -m
    (start_ray "$node" "${place[@]}" ${RAY_START_ARGS:-}) >&2 </dev/null &
    set +m
    started+=($!)
    # A node joins the head, so the head must listen first.
    [ ${#started[@]} -gt 1 ] || timeout "$RAY_WAIT_SECONDS" bash -c "until (: <>/dev/tcp/$head_host/$RAY_PORT) 2>/dev/null; do sleep 1; done"
done

timeout "$RAY_WAIT_SECONDS" "$PYTHON" -c "
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')
while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)
" "$RAY_ADDRESS" "$NNODES" || {
    echo "run_multi_node.sh: not all of ${nodes[*]} joined Ray at $RAY_ADDRESS within $RAY_WAIT_SECONDS seconds." >&2
    exit 1
}
