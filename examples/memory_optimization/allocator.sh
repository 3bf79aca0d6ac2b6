# Sourced by the scripts beside it. Chooses the allocators of the run and of its workers:
#   ALLOCATOR=tcmalloc|jemalloc   host allocator, preloaded; returns freed pages to the system sooner than glibc's allocator
#   PYTORCH_ALLOC_CONF=...        options of PyTorch's device allocator, passed on unchanged
#   ALLOCATOR_DIRS="a b"          where to look for the library before the system's folders
find_allocator() {
    local folder name library
    for folder in ${ALLOCATOR_DIRS:-} /usr/lib/*-linux-gnu /usr/lib64 /usr/lib /usr/local/lib /lib/*-linux-gnu; do
        for name in $1; do
            for library in "$folder"/$name; do
                [ -e "$library" ] && echo "$library" && return 0
            done
        done
    done
    return 1
}

case "${ALLOCATOR:-}" in
"") ;;
tcmalloc | jemalloc)
    if [ "$ALLOCATOR" = tcmalloc ]; then
        names='libtcmalloc_minimal.so* libtcmalloc.so*' package=libtcmalloc-minimal4
    else
        names='libjemalloc.so*' package=libjemalloc2
    fi
    if ! library=$(find_allocator "$names"); then
        echo "ALLOCATOR=$ALLOCATOR: no lib$ALLOCATOR.so found. Install it (apt-get install $package), name its folder in ALLOCATOR_DIRS," \
            "or leave ALLOCATOR out." >&2
        exit 2
    fi
    export LD_PRELOAD="$library${LD_PRELOAD:+:$LD_PRELOAD}"
    ;;
*)
    echo "ALLOCATOR=$ALLOCATOR: unknown allocator. Use tcmalloc or jemalloc, or leave it out." >&2
    exit 2
    ;;
esac
if [ -n "${PYTORCH_ALLOC_CONF:-}" ]; then
    export PYTORCH_ALLOC_CONF
fi
