usage='usage: start-all.sh [--dry-run | --stop] [--check] [--copy] [--only DOMAIN]...

Starts the whole job from here: plain hosts over ssh, Slurm domains with sbatch, Kubernetes domains
with kubectl. Waits until all have ended; when one fails, or at Ctrl-C, ends the others.
  --dry-run      print the commands and run none
  --stop         end what start-all.sh has started
  --check        start no trainer: check.py looks at every host and at the network between them,
                 and the report of the first host is printed; status 0 ready, 1 mend something
  --copy         first copy this folder to every plain host, under the same path
  --only DOMAIN  this launch domain only, for instance where another one has its own login node;
                 all meet at the barrier, so start the others meanwhile

Environment: HETPLAN_REMOTE_FOLDER (the folder on plain hosts, left out: the same path),
HETPLAN_BARRIER_SECONDS (how long hosts wait for each other, left out: 1800); TRAINER_FOLDER,
HETPLAN_PYTHON and HETPLAN_LOGS are passed on to plain hosts.'

# bash may pass over an interrupt that has no trap and comes while a command runs.
trap 'exit 143' TERM
trap 'exit 130' INT HUP

say() { printf 'hetplan: %s\n' "$*" >&2; }
fail() { say "$*"; exit 2; }

mode=run
check=no
copy=no
only=()
while (($# > 0)); do
  case $1 in
    --dry-run) mode=dry ;;
    --stop) mode=stop ;;
    --check) check=yes ;;
    --copy) copy=yes ;;
    --only)
      shift
      only+=("${1:?--only needs the name of a domain}")
      ;;
    -h | --help) printf '%s\n' "$usage"; exit 0 ;;
    *) fail "unknown option $1; $usage" ;;
  esac
  shift
done

start_words=()
end_of_log=start
if [[ $check == yes ]]; then
  start_words=(--check)
  end_of_log=check
fi
remote=${HETPLAN_REMOTE_FOLDER:-$folder}
logs=$folder/logs
poll=${HETPLAN_POLL_SECONDS:-5}

# Whether a domain is to be started.
asked_for() {
  local name
  ((${#only[@]} == 0)) && return 0
  for name in "${only[@]}"; do
    [[ $name == "$1" ]] && return 0
  done
  return 1
}

for name in ${only[@]+"${only[@]}"}; do
  known=no
  for domain in "${domains[@]}"; do [[ $domain == "$name" ]] && known=yes; done
  [[ $known == yes ]] || fail "no domain is called $name; there are: ${domains[*]}"
done

need() {
  command -v "$1" > /dev/null && return
  fail "$1 is not here, so domain $2 cannot be started from here: run start-all.sh --only $2" \
    "where it is, and start-all.sh --only ... for the others here"
}

# Sets `quoted` to the words of a command for another host's shell.
quote_words() {
  printf -v quoted '%q ' "$@"
  quoted=${quoted% }
}

# Sets `connect` to the ssh command of a plain host: user, port, address.
connect_to() {
  connect=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30 -p "$2")
  [[ -z $1 ]] || connect+=(-l "$1")
  connect+=(-- "$3")
}

# Every plain host that is asked for: sets hosts, addresses, users, ports.
hosts=() addresses=() users=() ports=()
for at in "${!plain_domains[@]}"; do
  asked_for "${plain_domains[$at]}" || continue
  while IFS=$'\t' read -r _ host address _; do
    hosts+=("$host")
    addresses+=("$address")
    users+=("${plain_users[$at]}")
    ports+=("${plain_ports[$at]}")
  done < <(awk -F '\t' -v "domain=${plain_domains[$at]}" \
    'NR > 1 && $4 == domain && !seen[$2]++' "$folder/agents.tsv")
done

# Sets `command` to what starts, stops or prepares (a third word) a plain host.
host_command() {
  local passed=() name
  for name in TRAINER_FOLDER HETPLAN_PYTHON HETPLAN_BARRIER_SECONDS HETPLAN_LOGS; do
    [[ -z ${!name:-} ]] || passed+=("$name=${!name}")
  done
  connect_to "${users[$1]}" "${ports[$1]}" "${addresses[$1]}"
  quote_words env ${passed[@]+"${passed[@]}"} bash "$remote/start-here.sh" "${@:2}" "${hosts[$1]}"
  command=("${connect[@]}" "$quoted")
}

run_or_print() {
  if [[ $mode == dry ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

slurm_job() { [[ -s $logs/$1.job ]] && IFS=';' read -r job rest < "$logs/$1.job"; }

# Sets `kube` to kubectl with the namespace of a domain.
kube_of() {
  kube=(kubectl)
  [[ -z ${pod_namespaces[$1]} ]] || kube+=(--namespace "${pod_namespaces[$1]}")
}

# Sets `manifest` to the file of a domain for what its cluster has.
manifest_of() {
  manifest=$folder/kubernetes-${pod_domains[$1]}.yaml
  if [[ $check == yes ]]; then
    manifest=$folder/kubernetes-${pod_domains[$1]}-check.yaml
  elif [[ $mode != dry ]] &&
    ! kubectl get crd pytorchjobs.kubeflow.org > /dev/null 2>&1; then
    manifest=$folder/kubernetes-${pod_domains[$1]}-jobs.yaml
  fi
}

stop_domains() {
  local at job rest pids=()
  for at in "${!hosts[@]}"; do
    host_command "$at" --stop
    "${command[@]}" < /dev/null > /dev/null 2>&1 &
    pids+=("$!")
  done
  for at in "${!slurm_domains[@]}"; do
    asked_for "${slurm_domains[$at]}" && slurm_job "${slurm_domains[$at]}" && scancel "$job"
  done
  for at in "${!pod_domains[@]}"; do
    asked_for "${pod_domains[$at]}" || continue
    kube_of "$at"
    for manifest in "$folder/kubernetes-${pod_domains[$at]}"{,-jobs,-check}.yaml; do
      [[ -f $manifest ]] || continue
      # The first holds an object that a cluster without Kubeflow does not know.
      "${kube[@]}" delete --ignore-not-found --wait=false -f "$manifest" > /dev/null 2>&1
    done
  done
  for at in ${pids[@]+"${pids[@]}"}; do wait "$at"; done
}

((${#hosts[@]} == 0)) || need ssh "${plain_domains[0]}"
for domain in ${slurm_domains[@]+"${slurm_domains[@]}"}; do
  if asked_for "$domain" && [[ $mode != dry ]]; then need sbatch "$domain"; fi
done
for domain in ${pod_domains[@]+"${pod_domains[@]}"}; do
  asked_for "$domain" || continue
  [[ $mode == dry ]] || need kubectl "$domain"
  [[ $check == no || -f $folder/kubernetes-$domain-check.yaml ]] ||
    fail "$domain has too many hosts for a check in pods: check the others with --only"
done

if [[ $mode == stop ]]; then
  stop_domains
  exit 0
fi

# Copies this folder to a plain host.
copy_to() {
  local into quoted
  quote_words "$remote"
  into=$quoted
  connect_to "${users[$1]}" "${ports[$1]}" "${addresses[$1]}"
  if [[ $mode == dry ]]; then
    printf '%q ' tar -C "$folder" --exclude=./logs -cf - .
    printf '| '
    run_or_print "${connect[@]}" "mkdir -p $into && tar -C $into -xf -"
  else
    tar -C "$folder" --exclude=./logs -cf - . | "${connect[@]}" "mkdir -p $into && tar -C $into -xf -"
  fi
}

if [[ $copy == yes ]]; then
  copies=()
  for at in "${!hosts[@]}"; do
    if [[ $mode == dry ]]; then
      copy_to "$at"
    else
      copy_to "$at" &
      copies[at]=$!
    fi
  done
  for at in "${!copies[@]}"; do
    wait "${copies[$at]}" || fail "the folder could not be copied to ${hosts[$at]}"
  done
fi

if [[ $mode == dry ]]; then
  for domain in ${slurm_domains[@]+"${slurm_domains[@]}"}; do
    asked_for "$domain" || continue
    run_or_print sbatch --parsable "slurm-$domain.sbatch" ${start_words[@]+"${start_words[@]}"}
  done
  for at in "${!pod_domains[@]}"; do
    asked_for "${pod_domains[$at]}" || continue
    kube_of "$at"
    manifest_of "$at"
    run_or_print "${kube[@]}" create -f "$manifest"
  done
  for at in "${!hosts[@]}"; do
    host_command "$at" ${start_words[@]+"${start_words[@]}"}
    run_or_print "${command[@]}"
  done
  exit 0
fi

mkdir -p -- "$logs" || fail "cannot make $logs"

# Waits until a job of Slurm has ended; its status is what its script left in the folder.
wait_for_slurm() {
  local missed=0
  while ((missed < 3)); do
    [[ ! -s $logs/$1.status ]] || break
    if [[ -n $(squeue -h -j "$2" -o %T 2>/dev/null) ]]; then missed=0; else missed=$((missed + 1)); fi
    sleep "$poll"
  done
  [[ -s $logs/$1.status ]] || { say "$1: job $2 is gone and left no status"; return 1; }
  read -r status < "$logs/$1.status"
  return "$status"
}

# Waits until all pods of a domain have succeeded or one has failed; then keeps their logs.
wait_for_pods() {
  local pods pod node phase status='' failed=0 label=${pod_jobs[$1]}
  [[ $check == no ]] || label+=-check
  kube_of "$1"
  while [[ -z $status ]]; do
    sleep "$poll"
    pods=$("${kube[@]}" get pods -l "hetplan-job=$label" -o \
      'jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName} {.status.phase}{"\n"}{end}')
    done_pods=0
    while read -r pod node phase; do
      case $phase in
        Succeeded) done_pods=$((done_pods + 1)) ;;
        Failed)
          failed=1
          done_pods=$((done_pods + 1))
          # Of a check every pod has something to say.
          [[ $check == no ]] || continue
          say "${pod_domains[$1]}: pod $pod on $node has failed"
          status=1
          ;;
      esac
    done <<< "$pods"
    ((done_pods < pod_counts[$1])) || status=${status:-$failed}
  done
  while read -r pod node phase; do
    [[ -n $pod ]] || continue
    log=$logs/$pod.log
    [[ $check == no ]] || log=$logs/$node.check.log
    "${kube[@]}" logs "$pod" > "$log" 2>&1
  done <<< "$pods"
  return "$status"
}

set -m # each background process is a group of its own
children=()
labels=()

leave() {
  local waited=0 child
  trap '' TERM INT HUP
  if (($1 != 0)) && [[ -n $(running_children) ]]; then say "ending all others"; fi
  while ((waited == 0)) || [[ -n $(running_children) ]] && ((waited < ${HETPLAN_GRACE_SECONDS:-60})); do
    # Again after a while: a host may have been told before it had begun.
    ((waited % 15 != 0)) || stop_domains
    [[ -n $(running_children) ]] || break
    sleep 1
    waited=$((waited + 1))
  done
  for child in $(running_children); do kill -KILL -- "-$child" 2>/dev/null; done
  exit "$1"
}
trap 'say "told to end"; leave 143' TERM
trap 'say interrupted; leave 130' INT HUP

for at in "${!slurm_domains[@]}"; do
  domain=${slurm_domains[$at]}
  asked_for "$domain" || continue
  rm -f -- "$logs/$domain.status" "$logs/$domain.job"
  (cd -- "$folder" &&
    sbatch --parsable "slurm-$domain.sbatch" ${start_words[@]+"${start_words[@]}"}) \
    > "$logs/$domain.job" ||
    { say "$domain: sbatch refused the job"; leave 1; }
  slurm_job "$domain" || { say "$domain: sbatch named no job"; leave 1; }
  say "$domain: submitted job $job"
  wait_for_slurm "$domain" "$job" &
  children+=("$!")
  labels+=("domain $domain (Slurm job $job)")
done
for at in "${!pod_domains[@]}"; do
  domain=${pod_domains[$at]}
  asked_for "$domain" || continue
  kube_of "$at"
  manifest_of "$at"
  "${kube[@]}" create -f "$manifest" >&2 ||
    { say "$domain: not created; of an earlier start? start-all.sh --stop removes it"; leave 1; }
  wait_for_pods "$at" &
  children+=("$!")
  labels+=("domain $domain (Kubernetes)")
done
for at in "${!hosts[@]}"; do
  host_command "$at" ${start_words[@]+"${start_words[@]}"}
  "${command[@]}" < /dev/null > "$logs/${hosts[$at]}.$end_of_log.log" 2>&1 &
  children+=("$!")
  labels+=("host ${hosts[$at]}")
done
say "started ${#children[@]}: ${#hosts[@]} plain hosts, the rest domains; logs in $logs"

# Prints the report of a check, which is that of the job's first host.
print_report() {
  local host address domain rest
  { read -r && IFS=$'\t' read -r _ host address domain rest; } < "$folder/agents.tsv"
  if ! asked_for "$domain"; then
    say "$host, the first host, tells of all: it is of domain $domain, which was not asked for"
  elif slurm_job "$domain"; then
    cat -- "$folder/slurm-$domain-$job.out"
  else
    cat -- "$logs/$host.check.log"
  fi
}

# Waits until all have ended well or one has not; of a check, until all have ended.
worst=0
open=("${!children[@]}")
while ((${#open[@]} > 0)); do
  running=" $(jobs -rp | tr '\n' ' ')"
  left=()
  for at in "${open[@]}"; do
    if [[ $running == *" ${children[$at]} "* ]]; then
      left+=("$at")
      continue
    fi
    wait "${children[$at]}"
    status=$?
    if [[ $check == yes ]]; then
      ((status <= worst)) || worst=$status
      ((status <= 1)) || say "${labels[$at]} was not checked: status $status, see $logs"
      continue
    fi
    if ((status != 0)); then
      say "${labels[$at]} has failed with status $status"
      log=$logs/${labels[$at]#host }.start.log
      if [[ ${labels[$at]} == "host "* && -s $log ]]; then
        say "last lines of $log:"
        tail -n 15 -- "$log" >&2
      fi
      leave "$status"
    fi
    say "${labels[$at]} is done"
  done
  open=(${left[@]+"${left[@]}"})
  if ((${#open[@]} > 0)); then
    sleep 1 &
    wait "$!" 2>/dev/null
  fi
done
if [[ $check == yes ]]; then
  print_report
  leave "$worst"
fi
say "all are done"
leave 0
