#!/bin/sh
# preStop hook: Serve starts this node's replicas elsewhere, then stops them here once they have answered
# what they accepted. Waits for that, at most $1 seconds.
seconds=${1:-120}
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is ending" \
    --deadline-remaining-seconds "$seconds" || exit 0
while [ "$seconds" -gt 0 ] && pgrep -f '^ray::ServeReplica' >/dev/null; do
    sleep 1
    seconds=$((seconds - 1))
done
