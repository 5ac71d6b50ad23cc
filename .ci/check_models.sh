#!/usr/bin/env bash
# Runs attnfuse on MODELS, or on the models that differ from the commit BASE, with OPTIONS. The action in action.yml calls this.
set -euo pipefail

models=()
if [ -n "${MODELS:-}" ]; then
  read -r -a models <<< "$MODELS"
elif [[ "${BASE:-}" =~ ^0*$ ]]; then # a new branch: every model
  while IFS= read -r -d '' path; do models+=("$path"); done < <(git ls-files -z -- '*.onnx')
else
  git cat-file -e "$BASE^{commit}" 2> /dev/null || git fetch --quiet --depth=1 origin "$BASE"
  while IFS= read -r -d '' path; do models+=("$path"); done < <(git diff -z --name-only --diff-filter=d "$BASE" HEAD -- '*.onnx')
fi
if [ "${#models[@]}" = 0 ]; then
  echo "no model to check"
  exit 0
fi
read -r -a options <<< "${OPTIONS:-}"
attnfuse optimize --dry-run --format github ${options[@]+"${options[@]}"} -- "${models[@]}" # bash 3 has no empty arrays
