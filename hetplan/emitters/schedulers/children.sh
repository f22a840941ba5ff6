# ---------------------------------------------------------------- what follows is not the plan's

# Prints the numbers of this shell's background processes that run. The shell's list alone will not
# do: where a trap comes while a process is started, bash 5.2 may list it as running for ever.
running_children() {
  local child state
  for child in $(jobs -rp); do
    state=$(cat "/proc/$child/stat" 2>/dev/null) || continue
    state=${state##*) }
    [[ $state == Z* ]] || printf '%s\n' "$child"
  done
}

