#!/bin/sh
# Both directions, one after the other: train.sh PREPARED_DATA OUT. Killed and started again, it goes on where it was.
set -eu
data=$1 out=$2
for pair in "fr en" "en fr"; do
    set -- $pair
    python -m benchmarks.translation.train --data "$data" --out "$out/$1-$2" --source "$1" --target "$2"
done
