usage='usage: start-here.sh [--dry-run | --stop | --check] [HOST]

Starts this host'"'"'s part of the job. HOST: its name in agents.tsv; left out: HETPLAN_HOST, Slurm'"'"'s
name of the node, or what hostname says.
  --dry-run  print the commands and start nothing
  --stop     end what start-here.sh started on this host
  --check    start no trainer: run check.py, which all hosts must do at one time'

# bash may pass over an interrupt that has no trap and comes while a command runs.
trap 'exit 143' TERM
trap 'exit 130' INT HUP

say() { printf 'hetplan: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

mode=run
asked=
for word in "$@"; do
  case $word in
    --dry-run) mode=dry ;;
    --stop) mode=stop ;;
    --check) mode=check ;;
    -h | --help) printf '%s\n' "$usage"; exit 0 ;;
    -*) fail "unknown option $word; $usage" ;;
    *) asked=$word ;;
  esac
done

# Names by which this host may stand in the table, the surest first.
candidates=()
if [[ -n $asked ]]; then
  candidates=("$asked")
elif [[ -n ${HETPLAN_HOST:-} ]]; then
  candidates=("$HETPLAN_HOST")
else
  for name in "${SLURMD_NODENAME:-}" "$(hostname 2>/dev/null)" "$(hostname -f 2>/dev/null)"; do
    [[ -n $name && " ${candidates[*]-} " != *" $name "* ]] && candidates+=("$name")
  done
fi

# Sets `host` to the table's name of this host: equal to a candidate, or else alike up to the first
# dot with one host only. IP addresses have no short form.
find_host() {
  local name rank row address rest short found
  for name in "${candidates[@]}"; do
    while IFS=$'\t' read -r rank row address rest; do
      [[ $rank != node_rank ]] || continue
      if [[ $row == "$name" || $address == "$name" ]]; then
        host=$row
        return 0
      fi
    done < "$folder/agents.tsv"
  done
  for name in "${candidates[@]}"; do
    [[ $name == *[!0-9.:]* ]] || continue
    short=${name%%.*}
    found=
    while IFS=$'\t' read -r rank row address rest; do
      [[ $rank != node_rank && $row == *[!0-9.:]* ]] || continue
      [[ ${row%%.*} == "$short" && $row != "$found" ]] || continue
      [[ -z $found ]] || fail "$name may be $found or $row; say which: start-here.sh HOST"
      found=$row
    done < "$folder/agents.tsv"
    if [[ -n $found ]]; then
      host=$found
      return 0
    fi
  done
  fail "none of the hosts in $folder/agents.tsv is called ${candidates[*]:-anything}; say which one" \
    "this is: start-here.sh HOST"
}

host=
find_host
logs=${HETPLAN_LOGS:-$folder/logs}
pid_file=$logs/$host.pid
if [[ $logs == - ]]; then pid_file=${TMPDIR:-/tmp}/hetplan-$token-$host.pid; fi

# Whether a process is a start-here.sh other than this one: a number alone may be another program's.
runs_here() {
  [[ $1 =~ ^[0-9]+$ && $1 != "$$" && -r /proc/$1/cmdline ]] || return 1
  [[ $(tr '\0' ' ' < "/proc/$1/cmdline") == *start-here.sh* ]]
}

if [[ $mode == stop ]]; then
  pid=$(cat -- "$pid_file" 2>/dev/null) || { say "$host: nothing runs"; exit 0; }
  if runs_here "$pid"; then
    kill -TERM "$pid" && say "$host: told process $pid to end"
  else
    say "$host: nothing runs"
  fi
  exit 0
fi

# Agents of this host.
agent_ranks=() agent_counts=() agent_first=()
while IFS=$'\t' read -r rank row address rest first count rest; do
  [[ $row == "$host" ]] || continue
  agent_ranks+=("$rank")
  agent_first+=("$first")
  agent_counts+=("$count")
done < "$folder/agents.tsv"

# Sets `filled` to a text with {folder} replaced.
fill_folder() {
  local rest=$1
  filled=
  while [[ $rest == *'{folder}'* ]]; do
    filled+=${rest%%'{folder}'*}$folder
    rest=${rest#*'{folder}'}
  done
  filled+=$rest
}

# Sets `own_environment` and `own_arguments` to those of the agent of a node rank.
read_agent() {
  local rank text
  own_environment=() own_arguments=()
  while IFS=$'\t' read -r rank text; do
    [[ $rank == "$1" ]] || continue
    [[ ${text%%=*} =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "agents-environment.tsv: $text"
    fill_folder "$text"
    own_environment+=("$filled")
  done < "$folder/agents-environment.tsv"
  while IFS=$'\t' read -r rank text; do
    [[ $rank == "$1" ]] || continue
    fill_folder "$text"
    own_arguments+=("$filled")
  done < "$folder/agents-arguments.tsv"
}

# Sets `command` to the call of torchrun for the agent at a position.
make_command() {
  read_agent "${agent_ranks[$1]}"
  command=(
    "$python" -m torch.distributed.run
    --nnodes="$nnodes"
    --nproc-per-node="${agent_counts[$1]}"
    --node-rank="${agent_ranks[$1]}"
    --rdzv-backend=static
    --master-addr="$master_address"
    --master-port="$master_port"
    "${program[@]}"
    ${arguments[@]+"${arguments[@]}"}
    ${own_arguments[@]+"${own_arguments[@]}"}
  )
}

if [[ $mode == run && -n $trainer_folder ]]; then
  cd -- "$trainer_folder" || fail "$host: there is no trainer in $trainer_folder"
elif [[ $mode == run && $program_is_in_folder == yes ]]; then
  fail "set TRAINER_FOLDER to the trainer's folder, which holds ${program[0]}"
fi

# torchrun takes PET_* as its arguments' defaults; Kubeflow sets some for another numbering.
unset "${!PET_@}"
barrier=("$python" "$folder/barrier.py" --timeout "${HETPLAN_BARRIER_SECONDS:-1800}")
barrier+=("$folder/agents.tsv" "$barrier_port" "$token" "$host")

if [[ $mode == dry ]]; then
  printf '%q ' "${barrier[@]}"
  printf '\n'
  for position in "${!agent_ranks[@]}"; do
    make_command "$position"
    printf '%q ' env ${own_environment[@]+"${own_environment[@]}"} "${command[@]}"
    printf '\n'
  done
  exit 0
fi

# Where check.py looks for the trainer is written in check.json, or TRAINER_FOLDER says it.
if [[ $mode == check ]]; then
  barrier=("$python" "$folder/check.py" --host "$host")
  [[ -z ${HETPLAN_BARRIER_SECONDS:-} ]] || barrier+=(--timeout "$HETPLAN_BARRIER_SECONDS")
fi

[[ $logs == - ]] || mkdir -p -- "$logs" || fail "$host: cannot make $logs"
if pid=$(cat -- "$pid_file" 2>/dev/null) && runs_here "$pid"; then
  fail "$host: process $pid has been started here and still runs; end it: start-here.sh --stop"
fi
printf '%s\n' "$$" > "$pid_file" || fail "$host: cannot write $pid_file"

set -m # each background process is a group of its own, so that all of it can be ended
children=()
labels=()
child_logs=()

# Of this start: a copy of this folder may run here too.
mark=$token:$host:$$-$(date +%s)

# Prints the numbers of all processes of this host's agents. A torchrun that was killed leaves its
# ranks behind, each in a session of its own; they keep the variable that marks them.
marked_processes() {
  grep -lzsx -- "HETPLAN_AGENT_OF=$mark" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3
}

# Sends a signal to all that this script runs in the background. The shell's own list is asked: a
# trap may come before the number of a new process is kept.
tell_children() {
  local child
  for child in $(running_children); do
    kill "-$1" -- "-$child" 2>/dev/null
  done
}

# Ends what this script started: told first, killed after a while.
end_children() {
  local child ranks launchers waited=0
  while [[ -n $(running_children) ]] && ((waited < ${HETPLAN_GRACE_SECONDS:-40})); do
    if ((waited == 0)); then
      tell_children TERM
    elif ((waited % 5 == 0)); then
      # What torchrun's handler raises can be lost where Python may not raise. Told again, it would
      # not let its ranks end what they do, so those are told instead.
      launchers=$(running_children)
      ranks=$(marked_processes | grep -vxF -e "$launchers")
      for child in $ranks; do
        kill -TERM "$child" 2>/dev/null
      done
      if [[ -z $ranks ]]; then
        # There is nothing left to wait for but a launcher that does not end.
        ((waited < 10)) || break
        tell_children TERM
      fi
    fi
    sleep 1 &
    wait "$!" 2>/dev/null
    waited=$((waited + 1))
  done
  tell_children KILL
  for child in $(marked_processes); do
    kill -KILL "$child" 2>/dev/null
  done
}

leave() {
  trap '' TERM INT HUP
  end_children
  rm -f -- "$pid_file"
  exit "$1"
}
trap 'say "$host: told to end"; leave 143' TERM
trap 'say "$host: interrupted"; leave 130' INT HUP

"${barrier[@]}" &
wait "$!"
status=$?
[[ $mode != check ]] || leave "$status"
if ((status != 0)); then
  say "$host: not started, the barrier ended with status $status"
  leave "$status"
fi

for position in "${!agent_ranks[@]}"; do
  make_command "$position"
  last=$((agent_first[position] + agent_counts[position] - 1))
  labels[position]="agent ${agent_ranks[$position]} (ranks ${agent_first[$position]} to $last)"
  child_logs[position]=
  [[ $logs == - ]] || child_logs[position]=$logs/$host-agent${agent_ranks[$position]}.log
  (
    trap - TERM INT HUP
    export HETPLAN_AGENT_OF="$mark"
    for text in ${own_environment[@]+"${own_environment[@]}"}; do
      export "${text?}"
    done
    if [[ -n ${child_logs[$position]} ]]; then
      exec "${command[@]}" > "${child_logs[$position]}" 2>&1
    fi
    exec "${command[@]}"
  ) &
  children[position]=$!
  say "$host: started ${labels[$position]}${child_logs[$position]:+, log ${child_logs[$position]}}"
done

# Waits until all have ended well or one has not.
open=("${!children[@]}")
while ((${#open[@]} > 0)); do
  running=" $(jobs -rp | tr '\n' ' ')"
  left=()
  for position in "${open[@]}"; do
    if [[ $running == *" ${children[$position]} "* ]]; then
      left+=("$position")
      continue
    fi
    wait "${children[$position]}"
    status=$?
    if ((status != 0)); then
      say "$host: ${labels[$position]} ended with status $status"
      if [[ -n ${child_logs[$position]} ]]; then
        say "last lines of ${child_logs[$position]}:"
        tail -n 15 -- "${child_logs[$position]}" >&2
      fi
      leave "$status"
    fi
  done
  open=(${left[@]+"${left[@]}"})
  if ((${#open[@]} > 0)); then
    sleep 1 &
    wait "$!" 2>/dev/null
  fi
done
say "$host: all its agents are done"
leave 0
