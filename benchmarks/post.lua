-- The request every system gets, and the counts as one line of JSON, which wrk's text does not give.
wrk.method = "POST"
wrk.body = '{"name": "x", "value": 1}'
wrk.headers["Content-Type"] = "application/json"

-- With the argument "new" no two heads are alike, as where each carries the id of a trace.
init = function(args)
  if args[1] == "new" then
    local number = 0
    request = function()
      number = number + 1
      wrk.headers["X-Number"] = string.format("%09d", number)
      return wrk.format()
    end
  end
end

done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "duration_us": %d, "p50_us": %d, "p99_us": %d, "non_2xx": %d, "socket_errors": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.status, e.connect + e.read + e.write + e.timeout))
end
