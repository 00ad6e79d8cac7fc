// The three paths: the same inner loops, compiled for three instruction sets, chosen at run time.
//
// path_kernels.cpp is compiled once per path, with that path's flags, and fills one `PathKernels`. The algorithms (select.cpp,
// reduce.cpp, ...) are compiled once, for any CPU, and call the inner loops through `active()`.
#pragma once

#include <string>
#include <vector>

#include "path_kernels.hpp"

namespace topkube {

// The path in use: the best that this CPU runs, unless `use_path` chose another.
const PathKernels& active();

// The paths that this CPU runs, best first.
std::vector<std::string> available_paths();

// Takes the path called `name` from now on, in all threads; false where this CPU cannot run it.
bool use_path(const std::string& name);

}  // namespace topkube
