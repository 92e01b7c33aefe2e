-- The request comes from the environment, the result goes to standard output as one line of JSON.
wrk.method = "POST"
local file = io.open(os.getenv("BODY"), "rb")
wrk.body = file:read("*a")
file:close()
for name, value in string.gmatch(os.getenv("HEADERS"), "([^\n:]+):([^\n]*)") do
  wrk.headers[name] = value
end

done = function(summary, latency)
  local errors = summary.errors
  io.write(string.format('\n{"requests":%d,"bad_status":%d,"broken":%d,"us":%d,"p50_us":%f,"p99_us":%f}\n',
    summary.requests, errors.status, errors.connect + errors.read + errors.write + errors.timeout,
    summary.duration, latency:percentile(50), latency:percentile(99)))
end
