# Choose, for each group of the shim, the first candidate that compiles against the tree's headers.
#
# The compiler is called directly and only checks the file: CMake's try_compile would generate a
# project per candidate. A result is cached under a hash of everything that it depends on: a second
# configure run calls no compiler, and another tree in the same build directory is probed again.

set(PLK_INCLUDES
    "${PLK_LLAMA_SRC}/include" "${PLK_LLAMA_SRC}/ggml/include"
    "${PLK_LLAMA_SRC}/src" "${PLK_LLAMA_SRC}/ggml/src")

# The groups, and the candidates of each, best first. `none` is the stub if no candidate compiles.
set(PLK_GROUPS
    load context settings memory cells rollback update defrag moving mapping counters
    devices sampler grammar adapters pooling rpc)
set(PLK_load vocab model)
set(PLK_context init new)
set(PLK_settings getter member hidden)
set(PLK_memory memory self cache)
set(PLK_cells shared rows streams single_rows single unified context split view)
set(PLK_rollback memory guard patched context split prefix)
set(PLK_update unified self cache context)
set(PLK_defrag streams self cache compact)
set(PLK_moving patched)
set(PLK_mapping patched)
set(PLK_counters counters)
set(PLK_devices registry)
set(PLK_sampler chain functions)
set(PLK_grammar parser)
set(PLK_adapters list each first)
set(PLK_pooling rank)
set(PLK_rpc server cached plain field first)

# Set `out` to the chosen sources, and PLK_PROBES to the JSON that plk_probes() returns.
function(plk_choose folder out)
    plk_compiler_words(words)
    plk_headers_hash("${folder}" headers)
    set(sources "")
    set(answers "")
    foreach(group ${PLK_GROUPS})
        set(winner "none")
        set(candidates ${PLK_${group}})
        if(group STREQUAL "rpc" AND NOT GGML_RPC)
            set(candidates "")
        endif()
        foreach(candidate ${candidates})
            plk_probe("${folder}/${group}/${candidate}.cpp" "${headers}" "${words}" good)
            if(good)
                set(winner "${candidate}")
                break()
            endif()
        endforeach()
        list(APPEND sources "${folder}/${group}/${winner}.cpp")
        if(winner STREQUAL "none")
            if(NOT EXISTS "${folder}/${group}/none.cpp")
                message(FATAL_ERROR
                    "no candidate of the shim's group '${group}' compiles against this tree, "
                    "${PLK_LLAMA_SRC}: the release needs a new ${folder}/${group}/<name>.cpp. "
                    "The compiler's words: "
                    "${CMAKE_BINARY_DIR}/probes/${group}-*.log")
            endif()
            list(APPEND answers "\"${group}\": null")
        else()
            list(APPEND answers "\"${group}\": \"${winner}\"")
        endif()
        message(STATUS "shim: ${group}: ${winner}")
    endforeach()
    list(JOIN answers ", " answers)
    file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/plk-capabilities.json"
        CONTENT "{\"groups\": {${answers}}}\n" @ONLY)
    set(PLK_PROBES "{${answers}}" PARENT_SCOPE)
    set(${out} ${sources} PARENT_SCOPE)
endfunction()

# Set `out` to the definitions that name the defects of a tree which no header shows, by the text of
# its sources.
function(plk_markers tree out)
    set(found "")
    # All contexts share this counter of a matrix product between 0.3.6 and b5640 (llama.cpp #14035).
    set(file "${tree}/ggml/src/ggml-cpu/llamafile/sgemm.cpp")
    if(EXISTS "${file}")
        file(STRINGS "${file}" lines REGEX "static std::atomic<int64_t> +current_chunk")
        if(lines)
            list(APPEND found PLK_SHARED_COUNTER)
        endif()
    endif()
    # For a few days in July 2025 (0.3.12), the loop that splits a batch of a recurrent model lacked
    # the end at an empty micro-batch: it never ended and used all memory (llama.cpp #14575).
    set(file "${tree}/src/llama-memory-recurrent.cpp")
    if(EXISTS "${file}")
        file(STRINGS "${file}" loop REGEX "balloc\\.get_n_used\\(\\) < balloc\\.get_n_tokens\\(\\)")
        file(STRINGS "${file}" end REGEX "ubatch\\.n_tokens == 0")
        if(loop AND NOT end)
            list(APPEND found PLK_ENDLESS_SPLIT)
        endif()
    endif()
    set(${out} ${found} PARENT_SCOPE)
endfunction()

# Set `out` to the command that checks a source file without writing output.
function(plk_compiler_words out)
    separate_arguments(flags NATIVE_COMMAND "${CMAKE_CXX_FLAGS}")
    set(words "${CMAKE_CXX_COMPILER}" ${CMAKE_CXX_COMPILER_ARG1} ${flags}
        -std=c++17 -fsyntax-only -w
        "-I${CMAKE_CURRENT_SOURCE_DIR}" "-I${CMAKE_CURRENT_SOURCE_DIR}/shim")
    if(CMAKE_OSX_SYSROOT)
        list(APPEND words -isysroot "${CMAKE_OSX_SYSROOT}")
    endif()
    foreach(folder ${PLK_INCLUDES})
        list(APPEND words "-I${folder}")
    endforeach()
    set(${out} ${words} PARENT_SCOPE)
endfunction()

# Set `out` to a hash of all headers that a candidate may include. The headers are configure
# dependencies: after a patch adds or changes one, ninja configures again.
function(plk_headers_hash folder out)
    set(patterns "${CMAKE_CURRENT_SOURCE_DIR}/plk.h" "${folder}/*.h" "${folder}/*/*.h")
    foreach(include ${PLK_INCLUDES})
        list(APPEND patterns "${include}/*.h")
    endforeach()
    file(GLOB files CONFIGURE_DEPENDS ${patterns})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
    set(all "")
    foreach(file ${files})
        file(SHA256 "${file}" one)
        string(APPEND all "${one}")
    endforeach()
    string(SHA256 all "${all}")
    set(${out} "${all}" PARENT_SCOPE)
endfunction()

# Set `out` to TRUE if `source` compiles, else to FALSE. The messages of the compiler are written to
# probes/GROUP-CANDIDATE.log in the build directory.
function(plk_probe source headers words out)
    cmake_path(GET source STEM candidate)
    cmake_path(GET source PARENT_PATH parent)
    cmake_path(GET parent FILENAME group)
    if(NOT EXISTS "${source}")
        set(${out} FALSE PARENT_SCOPE)
        return()
    endif()
    file(SHA256 "${source}" text)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    string(SHA256 key "${text} ${headers} ${words} ${CMAKE_CXX_COMPILER_VERSION}")
    set(answer "PLK_PROBE_${group}_${candidate}")
    if(NOT "${${answer}}" MATCHES "^${key} ")
        execute_process(COMMAND ${words} "${source}"
            RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
        file(WRITE "${CMAKE_BINARY_DIR}/probes/${group}-${candidate}.log" "${text}")
        set(${answer} "${key} ${code}" CACHE INTERNAL "Hash and answer of a compile probe")
    endif()
    if("${${answer}}" STREQUAL "${key} 0")
        set(${out} TRUE PARENT_SCOPE)
    else()
        set(${out} FALSE PARENT_SCOPE)
    endif()
endfunction()
